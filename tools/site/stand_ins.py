# SPDX-License-Identifier: Apache-2.0
"""Frameworks that are not there: signatures and docstrings of the front ends are made when their modules are imported,
and gigabytes of PyTorch would add nothing to them."""

from __future__ import annotations

import contextlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from unittest import mock

FRAMEWORKS = ("torch", "transformers", "jax", "paddle")


class _Name(type):
    """Whatever a framework has: a class, so that annotations and base classes take it, named as it is written."""

    def __new__(cls, name, bases=(), body=None, **_):
        return super().__new__(cls, name, tuple(base for base in bases if base is not object), body or {})

    def __getattr__(cls, name):
        if name.startswith("__") and name != "__get__":
            raise AttributeError(name)
        return _made(f"{cls._path}.{name}")

    def __call__(cls, *arguments, **keywords):
        if "_path" not in vars(cls):  # a class of the front end
            return super().__call__(*arguments, **keywords)
        if len(arguments) == 1 and not keywords and isinstance(arguments[0], (FunctionType, type)):
            return arguments[0]  # a decorator
        return cls

    def __getitem__(cls, _):
        return cls

    def __iter__(cls):
        return iter(())

    def __repr__(cls):
        return vars(cls).get("_path") or super().__repr__()


def _made(path: str) -> _Name:
    return _Name(path.rpartition(".")[2], (), {"_path": path})


class _Module(ModuleType):
    __path__: list[str] = []
    __version__ = "999.0"
    __version_info__ = (999, 0)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _made(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.partition(".")[0] in FRAMEWORKS else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


@contextlib.contextmanager
def frameworks():
    """Imports inside find stand-ins of FRAMEWORKS and of tessera's bindings of them, whether they are there or not."""
    import tessera._bindings
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        with mock.patch.object(tessera._lib, "load"), mock.patch.object(tessera._bindings, "load"):
            yield
    finally:
        sys.meta_path.remove(finder)
