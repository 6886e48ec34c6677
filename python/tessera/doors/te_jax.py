# SPDX-License-Identifier: Apache-2.0
"""tessera.te.jax under the name transformer_engine.jax, for unchanged programs that import it: MaxText's
`attention: cudnn_flash_te`, layers of flax.

    with tessera.doors.te_jax.install():              # or: handle = install(); ...; handle.remove()
        from transformer_engine.jax.flax.transformer import DotProductAttention      # tessera's

The modules are tessera's own, under a second name. Modules of TransformerEngine that are not attention raise an
ImportError, as if TransformerEngine were not installed.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import pkgutil
import sys
import types

from . import DOORS

TESTED = DOORS["MaxText"].tested
_NAME = "tessera.doors.te_jax"
_HOST = "transformer_engine"


class Handle:
    """The names, until remove() or the end of a `with` block."""

    def __init__(self, ours: dict, before: dict):
        self.ours, self.before = ours, before

    def remove(self):
        """Gives the names back to the modules that had them before. Programs that hold a class of tessera keep
        it."""
        ours, self.ours = self.ours, {}
        for name, module in ours.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        if ours:
            sys.modules.update(self.before)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.remove()


def install(replace: bool = False) -> Handle:
    """Makes `import transformer_engine.jax` find tessera.te.jax; needs JAX, and flax for its layers.

    RuntimeError: TransformerEngine is imported already, or this was called before. replace=True allows both;
    modules that already imported names keep them.
    """
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == _HOST}
    if before and not replace:
        raise RuntimeError(f"{_NAME}: install(): {_HOST} is imported already; install before that, or remove() the "
                           "handle of an earlier install(), or say replace=True")
    ours = {f"{_HOST}.{name}": module for package in ("common", "jax") for name, module in _modules(package)}
    top = types.ModuleType(_HOST, f"tessera's attention under TransformerEngine's name: {_NAME}")
    top.__spec__ = importlib.machinery.ModuleSpec(_HOST, None, is_package=True)
    top.__path__ = []  # nothing else is found in it
    top.common, top.jax = ours[f"{_HOST}.common"], ours[f"{_HOST}.jax"]
    ours[_HOST] = top
    for name in before:
        del sys.modules[name]
    sys.modules.update(ours)
    return Handle(ours, before)


def _modules(package: str):
    """(name below tessera.te, module) of a package and all that is public in it; flax may be missing."""
    module = importlib.import_module(f"tessera.te.{package}")
    yield package, module
    for found in pkgutil.iter_modules(module.__path__):
        name = f"{package}.{found.name}"
        if found.name.startswith("_"):
            continue
        if found.ispkg:
            try:
                yield from _modules(name)
            except ModuleNotFoundError as error:
                if error.name != "flax":
                    raise
        else:
            yield name, importlib.import_module(f"tessera.te.{name}")
