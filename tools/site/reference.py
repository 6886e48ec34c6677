# SPDX-License-Identifier: Apache-2.0
"""The pages of the site that are made from the code: functions of each front end with their docstrings, tessera.h,
the help of the command line."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import stand_ins  # beside this file

ROOT = Path(__file__).resolve().parents[2]
# page -> (title, module)
_FRONT_ENDS = {
    "numpy": ("tessera: NumPy", "tessera"),
    "torch": ("tessera.torch", "tessera.torch"),
    "hf": ("tessera.hf", "tessera.hf"),
    "jax": ("tessera.jax", "tessera.jax"),
    "paddle": ("tessera.paddle", "tessera.paddle"),
    "flash_attn": ("tessera.flash_attn", "tessera.flash_attn"),
    "xformers": ("tessera.xformers", "tessera.xformers"),
}
_COMMANDS = ("env", "explain", "mask", "check", "bench", "demo")


def pages() -> dict[str, Callable[[], str]]:
    """path in docs/ -> what makes its markdown."""
    made = {f"reference/{name}.md": functools.partial(_front_end, *_FRONT_ENDS[name]) for name in _front_ends()}
    return made | {"reference/index.md": _index, "reference/c.md": _header, "reference/command_line.md": _command_line}


def _front_ends() -> list[str]:
    """Those that there are in this checkout."""
    places = {name: ROOT / "python" / module.replace(".", "/") for name, (_, module) in _FRONT_ENDS.items()}
    return [name for name, place in places.items() if place.is_dir() or place.with_suffix(".py").exists()]


def _index() -> str:
    lines = [f"- [{_FRONT_ENDS[name][0]}]({name}.md)" for name in _front_ends()]
    return "\n".join(["# Reference", "", "Made from the code: what functions say of themselves.", "", *lines,
                      "- [tessera.h](c.md)", "- [command line](command_line.md)", ""])


# ---- Python ----

def _front_end(title: str, name: str) -> str:
    with stand_ins.frameworks():
        module = importlib.import_module(name)
    names = getattr(module, "__all__", None) or \
        [key for key, value in vars(module).items() if getattr(value, "__module__", "") == name and key[0] != "_"]
    parts = [f"# {title}", _prose(inspect.getdoc(module) or "")]
    parts += [_entry(key, getattr(module, key)) for key in names if callable(getattr(module, key))]
    return "\n\n".join(parts) + "\n"


def _entry(name: str, thing) -> str:
    heading = f"## {name}"
    if inspect.isclass(thing):
        methods = [f"**`{key}`** {_first_line(value)}" for key, value in vars(thing).items()
                   if key[0] != "_" and (inspect.isfunction(value) or isinstance(value, property))]
        return "\n\n".join([heading, _prose(inspect.getdoc(thing) or ""), *methods])
    signature = inspect.signature(thing)
    shown = [str(parameter.replace(annotation=inspect.Parameter.empty))
             for parameter in signature.parameters.values()]
    first = next((i for i, parameter in enumerate(signature.parameters.values())
                  if parameter.kind is parameter.KEYWORD_ONLY), None)
    if first is not None:
        shown.insert(first, "*")
    code = textwrap.fill(f"{name}({', '.join(shown)})", 100, subsequent_indent=" " * (len(name) + 1))
    return f"{heading}\n\n```python\n{code}\n```\n\n{_prose(inspect.getdoc(thing) or '')}"


def _first_line(thing) -> str:
    return (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")


_KEYWORD = re.compile(r"^(\w+)=(.*?): (.*)\n((?:    .*\n?)+)", re.MULTILINE)


def _prose(text: str) -> str:
    """A docstring as markdown: keywords become a list, examples and indented lines code, the rest stays."""
    text = _KEYWORD.sub(lambda m: f"- **`{m[1]}`** = `{m[2]}`: {_escaped(m[3])}. "
                        f"{_escaped(' '.join(m[4].split()))}\n", text)
    blocks = []
    for block in text.split("\n\n"):
        if block.startswith(">>>"):
            block = f"```python\n{block}\n```"
        elif not block.startswith(("- **", "    ")):
            block = _escaped(block)
        blocks.append(block)
    return "\n\n".join(blocks)


def _escaped(text: str) -> str:
    """Text in which * _ [ < are themselves; what stands in backticks stays."""
    parts = re.split(r"(`+[^`]+`+)", text)
    parts[::2] = [re.sub(r"([*_\[<])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


# ---- C ----

_COMMENT = re.compile(r"/\*(.*?)\*/", re.DOTALL)


def _header() -> str:
    """tessera.h: its first comment, then each declaration under its comment."""
    text = (ROOT / "include" / "tessera.h").read_text()
    first = _COMMENT.search(text)
    parts = ["# tessera.h", "The C header, C99. What is stable in it: [the ABI](../abi.md).", _comment(first[0])]
    body = text[first.end():].replace("/* clang-format off */\n", "")
    while declared := re.search(r"^(typedef struct \w+ \{|enum \w+ \{|typedef void|TESSERA_API)", body, re.MULTILINE):
        before, body = body[:declared.start()], body[declared.start():]
        stop = re.search(r"^\}.*;$", body, re.MULTILINE) if "{" in declared[0] or "enum" in declared[0] else None
        one_line = re.match(r"enum [^\n]*\};", body)
        end = one_line.end() if one_line else stop.end() if stop else re.search(r"\);", body).end()
        above = re.search(r"(/\*(?:(?!\*/).)*\*/)\s*\Z", before, re.DOTALL)
        code, body = body[:end], body[end:]
        name = re.search(r"(?:enum|typedef struct) (\w+)|\(\*(\w+)\)|(tessera_\w+)\(", code)
        parts.append(f"## {next(filter(None, name.groups()))}")
        if above:
            parts.append(_comment(above[1]))
        parts.append(f"```c\n{code.replace('TESSERA_API ', '')}\n```")
    return "\n\n".join(parts) + "\n"


def _comment(text: str) -> str:
    lines = [re.sub(r"^ ?\*? ?", "", line) for line in text.strip()[2:-2].splitlines()]
    lines = [line for line in lines if "SPDX" not in line]
    blocks = "\n".join(lines).strip("\n").split("\n\n")
    return "\n\n".join(f"```text\n{block}\n```" if re.search(r"^  ", block, re.MULTILINE) else _escaped(block)
                       for block in blocks)


# ---- the rest ----

def _command_line() -> str:
    from tessera.__main__ import main
    parts = ["# Command line"]
    for command in ("", *_COMMANDS):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main([*command.split(), "--help"])
        parts.append(f"## {f'python -m tessera {command}'.strip()}\n\n```text\n{out.getvalue()}```")
    return "\n\n".join(parts) + "\n"
