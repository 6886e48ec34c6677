# SPDX-License-Identifier: Apache-2.0
"""Signatures and docstrings of functions that take the keywords of a table of _keywords."""

from __future__ import annotations

import inspect
import textwrap
import types
import typing
from collections.abc import Callable

from . import _keywords

_HEAD = """

Keywords. ValueError: a value of the wrong type, shape or dtype, a combination that is called illegal below, or a
keyword without another that it needs. Refused: a legal call that no backend can run.

"""


_Function = typing.TypeVar("_Function", bound=Callable[..., object])


def documented(table: dict[str, _keywords.Keyword], array: type,
               **defaults: tuple[object, str]) -> Callable[[_Function], _Function]:
    """Gives a function with ``**keywords`` the signature that the table describes, and the table in
    words. `array` is what the front end calls an array; `defaults` are those that it has of its own,
    each with a sentence about it. Static type checkers see the function as it is written."""
    def decorate(function: _Function) -> _Function:
        del function.__annotations__["keywords"]  # of static type checkers alone
        hints = typing.get_type_hints(function)
        parameters = [parameter.replace(annotation=hints[name]) for name, parameter in
                      list(inspect.signature(function).parameters.items())[:-1]]
        for name, row in table.items():
            default = defaults[name][0] if name in defaults else row.default
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default,
                                                annotation=_with_array(row.type, array)))
        function.__signature__ = inspect.Signature(parameters, return_annotation=hints["return"])
        if function.__doc__:
            words = _HEAD + "\n".join(_entry(row, *defaults.get(name, (row.default, "")))
                                      for name, row in table.items())
            function.__doc__ = inspect.cleandoc(function.__doc__) + words
        return function
    return decorate


def _entry(row: _keywords.Keyword, default, more: str) -> str:
    refused = "No backend has it yet: a call that it would change is Refused." if row.refused else \
        "For fp8 q." if row.raw else ""
    text = " ".join(filter(None, (row.doc, more, refused)))
    return f"{row.name}={default!r}: {row.form}\n" + textwrap.fill(
        text, 96, initial_indent="    ", subsequent_indent="    ")


def _with_array(hint, array: type):
    """The type of a row in words of the front end: its array in the place of any."""
    if hint is _keywords.Array:
        return array
    inner, origin = typing.get_args(hint), typing.get_origin(hint)
    if not inner or origin is typing.Literal:
        return hint
    replaced = tuple(_with_array(part, array) for part in inner)
    return (typing.Union if origin in (typing.Union, types.UnionType) else origin)[replaced]
