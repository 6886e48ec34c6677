# SPDX-License-Identifier: Apache-2.0
"""What public functions say of themselves."""

import inspect
import re

import tessera


def public_functions(module):
    functions = (getattr(module, name) for name in module.__all__)
    return [function for function in functions if inspect.isfunction(function)]


def assert_described(function):
    """Each parameter has a type and stands in the docstring; the result has a type."""
    signature = inspect.signature(function)
    assert signature.return_annotation is not signature.empty
    for name, parameter in signature.parameters.items():
        assert parameter.annotation is not parameter.empty, name
        assert re.search(rf"\b{name}\b", function.__doc__), name


def assert_utilities_are_tesseras(front):
    """merge and dropout_mask of a front end take what those of NumPy take, by the same names."""
    for name in ("merge", "dropout_mask"):
        ours, of_numpy = ([(parameter.name, parameter.kind, parameter.default)
                           for parameter in inspect.signature(getattr(module, name)).parameters.values()]
                          for module in (front, tessera))
        assert ours == of_numpy, name
