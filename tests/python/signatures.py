# SPDX-License-Identifier: Apache-2.0
"""What public functions say of themselves."""

import inspect
import re

import pytest

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


# What no front end takes: the function, its arguments, and what it says of them.
WRONG_UTILITIES = [
    ("merge", ([],), "parts=[]: must be a list of at least one pair (o, lse)"),
    ("merge", ([(1, 2, 3)],), "parts[0]=(1, 2, 3): must be a pair (o, lse)"),
    ("merge", ([(1, 2)],), "parts[0].o=1: must be a "),
    ("dropout_mask", (1, -2, 3, 4, 0.1, (1, 2)), "hq=-2: must not be negative"),
    ("dropout_mask", (1.5, 2, 3, 4, 0.1, (1, 2)), "b=1.5: must be an integer"),
    ("dropout_mask", (1, 2, 2**31, 2**31, 0.1, (1, 2)), "b, hq, sq, sk=(1, 2, 2147483648, 2147483648): the mask must "
     "have fewer than 2^63 elements"),
]


def assert_says(front, name, arguments, message):
    with pytest.raises(ValueError, match=re.escape(f"tessera.{name}: {message}")):
        getattr(front, name)(*arguments)


def assert_utilities_are_tesseras(front):
    """merge and dropout_mask of a front end take what those of NumPy take, by the same names."""
    for name in ("merge", "dropout_mask"):
        ours, of_numpy = ([(parameter.name, parameter.kind, parameter.default)
                           for parameter in inspect.signature(getattr(module, name)).parameters.values()]
                          for module in (front, tessera))
        assert ours == of_numpy, name
