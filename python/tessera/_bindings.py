# SPDX-License-Identifier: Apache-2.0
"""The compiled bindings of the front ends: where they are, and what became of them.

A front end works without its binding, through ctypes, only more slowly and on the CPU alone; so a binding that is
missing or does not load is a warning, once, and a line of `python -m tessera env`.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_NAMES = {"torch": "PyTorch", "jax": "JAX", "paddle": "PaddlePaddle"}
_why_not: dict[str, str] = {}


def load(framework: str, open_library: Callable[[str], object]) -> bool:
    """Hands the path of libtessera_<framework>.so to open_library; False, after one warning, where there is
    none or it does not load."""
    place = _place(framework)
    why = f"{_library(framework)} was not built; install the wheel, or compile tessera where " \
          f"{_NAMES[framework]} is installed"
    if place is not None:
        try:
            open_library(str(place))
            return True
        except (OSError, RuntimeError, ImportError) as error:
            why = f"{place} does not load: {' '.join(str(error).split())}; docs/packaging.md lists the " \
                  f"versions of {_NAMES[framework]} that it is for"
    _why_not[framework] = why
    warnings.warn(f"tessera.{framework}: {why}. Until then calls go through ctypes: several times the time "
                  "of a small call, and no CUDA tensors", RuntimeWarning, stacklevel=3)
    return False


def states() -> dict[str, str]:
    """What became of the binding of each front end that there is; imports the frameworks that are installed."""
    return {framework: _state(framework) for framework in _NAMES
            if (_PACKAGE / framework / "__init__.py").exists()}


def _state(framework: str) -> str:
    if importlib.util.find_spec(framework) is None:
        return f"{_NAMES[framework]} is not installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            importlib.import_module(f"tessera.{framework}")
        except Exception as error:  # of the framework's own import, too
            return f"tessera.{framework} does not import: {' '.join(str(error).split())}"
    with open("/proc/self/maps", encoding="utf-8") as maps:
        loaded = next((line.split()[-1] for line in maps if line.rstrip().endswith(_library(framework))), None)
    return f"loaded, {loaded}" if loaded else _why_not.get(framework, "not loaded")


def _library(framework: str) -> str:
    return f"libtessera_{framework}.so"


def _place(framework: str) -> Path | None:
    """Beside the front end in a wheel, in build/lib in a checkout."""
    places = (_PACKAGE / framework, _PACKAGE.parents[1] / "build" / "lib")
    return next((place / _library(framework) for place in places if (place / _library(framework)).exists()), None)
