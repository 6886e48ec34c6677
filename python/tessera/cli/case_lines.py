# SPDX-License-Identifier: Apache-2.0
"""Case lines from the command line and from .cases files."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_PLACES = (_PACKAGE / "cases", _PACKAGE.parents[1] / "tests" / "cases")


class UsageError(Exception):
    """Shown without a traceback; exit code 2."""


def split(words: list[str]) -> list[str]:
    """Cases as they were typed: each quoted, or tokens of which "fwd" and "bwd" begin a case."""
    cases: list[str] = []
    for word in words:
        if " " in word.strip() or not cases or word in ("fwd", "bwd"):
            cases.append(word)
        else:
            cases[-1] += " " + word
    return cases


def read(path: str | Path) -> list[str]:
    """The lines of a file without comments and blanks. A bare name is one of the suites that come
    with the source: smoke, ci, nightly."""
    place = Path(path)
    if not place.exists():
        place = find(f"{path}.cases") or place
    try:
        text = place.read_text()
    except OSError as error:
        raise UsageError(f"--cases {path}: {error.strerror or error}") from error
    lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def find(name: str) -> Path | None:
    """A file of tests/cases, in a checkout or in the package."""
    return next((place / name for place in _PLACES if (place / name).exists()), None)
