# SPDX-License-Identifier: Apache-2.0
"""What pip builds this package with: scikit-build-core, which compiles by CMake, after saying how long that takes.

It adds two things that pip leaves no other place for: the folder of the PyTorch that the user has, which an isolated
build does not see, and a fixed time in the archives, so that the same sources give the same bytes.
"""

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403  the hooks of PEP 517 and PEP 660

# Seconds that each part takes on one core of a server of 2024; measured, see docs/packaging.md.
_CORE_SECONDS = {"the CPU library": 270, "the CUDA kernels": 1400, "the PyTorch binding": 30}
_TORCH = "cmake.define.TESSERA_TORCH_DIR"
os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")  # 1980-01-01, the first day of zip


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    settings = _with_torch(config_settings)
    _say_how_long(settings)
    return _build.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    settings = _with_torch(config_settings)
    _say_how_long(settings)
    return _build.build_editable(wheel_directory, settings, metadata_directory)


def _with_torch(settings: dict | None) -> dict:
    """The settings with the folder of the PyTorch of this interpreter: pip hides its packages from
    the build, not where they are."""
    settings = dict(settings or {})
    spec = importlib.util.find_spec("torch")
    torch = Path(spec.submodule_search_locations[0] if spec else sysconfig.get_path("platlib") + "/torch")
    if _TORCH not in settings and (torch / "include").is_dir():
        settings[_TORCH] = str(torch)
    return settings


def _say_how_long(settings: dict):
    parts = ["the CPU library"]
    if str(settings.get("cmake.define.TESSERA_CUDA", "")).upper() in ("ON", "1", "TRUE", "YES"):
        parts.append("the CUDA kernels")
    if _TORCH in settings:
        parts.append("the PyTorch binding")
    cores = len(os.sched_getaffinity(0))
    minutes = sum(map(_CORE_SECONDS.get, parts)) / cores / 60
    text = f"tessera: compiling {' and '.join(parts)}: about {max(1, round(minutes))} min on {cores} cores"
    if _TORCH not in settings:
        text += "; no PyTorch beside this interpreter, so tessera.torch will be without its binding"
    _say(text + "\n")


def _say(text: str):
    """To the person at the terminal, though pip keeps what a build prints to itself unless it fails."""
    print(text, end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        return
    try:
        with open("/dev/tty", "w", encoding="utf-8") as terminal:
            terminal.write("\n" + text)
    except OSError:
        pass  # nobody is there
