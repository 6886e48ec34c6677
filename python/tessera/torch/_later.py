# SPDX-License-Identifier: Apache-2.0
"""What `import tessera.torch` leaves for later: modules of PyTorch that take as long to import as all the rest, and
that most programs never use."""

from __future__ import annotations

import sys
from collections.abc import Callable


def constant(function):
    """torch.compiler.assume_constant_result, which would import torch._dynamo to set this attribute."""
    function._dynamo_marked_constant = True
    return function


def when_imported(name: str, action: Callable[[], None]):
    """Calls action() once the module `name` is imported: now, if it is already."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder:
    """Finds one module as the finders behind it do, and then calls action() when it has run."""

    def __init__(self, name: str, action: Callable[[], None]):
        self.name, self.action = name, action

    def find_spec(self, name: str, path=None, target=None):
        if name != self.name:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        run = spec.loader.exec_module

        def run_and_act(module):
            run(module)
            if self in sys.meta_path:  # what only looks for a module may have made several specs of it
                sys.meta_path.remove(self)
                self.action()

        spec.loader.exec_module = run_and_act
        return spec
