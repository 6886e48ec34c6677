# SPDX-License-Identifier: Apache-2.0
"""How long the functions of a source file are, in lines; tools/sizes.py holds them to a budget.

Python is parsed. C++ and CUDA are read by their braces: a function is a block whose head has a list of parameters and
that stands in no other function. A lambda is a part of the function around it; in a table it is a function.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\''
                      r"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.DOTALL | re.MULTILINE)
HEAD = re.compile(r"([^;{}]*)([;{}])")
TEMPLATE = re.compile(r"\btemplate\s*<[^()]*?>(?=\s)")
ATTRIBUTE = re.compile(r"\b(?:__launch_bounds__|__attribute__)\s*(\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))")
TYPE = re.compile(r"\b(?:namespace|struct|class|union|enum|extern)\b[^()]*$")
NAME = re.compile(r"((?:\w+::)*[~\w]+|operator\W+)\s*\(")


class Function(NamedTuple):
    name: str
    line: int
    lines: int
    is_kernel: bool = False  # __global__


def functions(path: Path) -> list[Function]:
    return list((_of_python if path.suffix == ".py" else _of_cxx)(path.read_text()))


def _of_python(text: str) -> Iterator[Function]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield Function(node.name, node.lineno, node.end_lineno - node.lineno + 1)


def _of_cxx(text: str) -> Iterator[Function]:
    code = NOT_CODE.sub(lambda found: "\n" * found[0].count("\n"), text)
    open_blocks: list[Function | str | None] = []  # a function, the head before an initialiser, or neither
    before = ""
    for found in HEAD.finditer(code):
        head, brace = before + found[1], found[2]
        before = ""
        if brace == "{" and head[-1:].isidentifier():  # x{...}, as in a constructor's list of members
            open_blocks.append(head)
        elif brace == "{":
            signature = ATTRIBUTE.sub("", TEMPLATE.sub("", head))
            inside = any(isinstance(block, Function) for block in open_blocks)
            is_function = ")" in signature and not TYPE.search(signature) and not inside
            name = NAME.search(signature)
            line = 1 + code.count("\n", 0, found.end()) - head.lstrip().count("\n")
            open_blocks.append(Function(name[1].strip() if name else "a lambda", line, 0, "__global__" in head)
                               if is_function else None)
        elif brace == "}" and open_blocks:
            block = open_blocks.pop()
            if isinstance(block, Function):
                yield block._replace(lines=1 + code.count("\n", 0, found.end()) - block.line + 1)
            elif block:
                before = block + " "
