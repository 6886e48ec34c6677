#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Public names and signatures of TransformerEngine's attention beside tessera.te's.

    python tools/peers/te_names.py              fetch the sources from PyPI, print what is missing here
    python tools/peers/te_names.py --record     also write docs/data/te_names.json and the table of docs/te.md
    python tools/peers/te_names.py --recorded   print what is missing of the recorded ones, offline

TransformerEngine is read, never imported: it wants a GPU. Its Python lies in the wheel transformer_engine, the names
of its extension in the source distribution transformer_engine_torch. tests/python/te/test_te_names.py holds the table.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import peer_names

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "data" / "te_names.json"
PAGE = ROOT / "docs" / "te.md"
BEGIN, END = "<!-- te_names: begin -->\n", "<!-- te_names: end -->\n"
VERSION = "2.20.2"
_DOT = "pytorch.attention.dot_product_attention"
# Below transformer_engine there and tessera.te here.
MODULES = (
    "pytorch.attention", _DOT, f"{_DOT}.dot_product_attention", f"{_DOT}.backends", f"{_DOT}.context_parallel",
    f"{_DOT}.flex_attention", f"{_DOT}.softmax", f"{_DOT}.utils", "pytorch.attention.custom_ops",
    "pytorch.attention.fused_mla_q_uproj", "pytorch.attention.inference", "pytorch.attention.linear_attention",
    "pytorch.attention.multi_head_attention", "pytorch.attention.rope", "pytorch.constants",
    "pytorch.cpp_extensions.fused_attn", "pytorch.cpu_offload", "pytorch.graph", "pytorch.transformer",
    "common.recipe", "jax.attention", "jax.cpp_extensions.attention", "jax.flax.transformer", "jax.sharding")
EXTENSION = "transformer_engine_torch"
# What the extension has about attention.
_ATTENTION = re.compile(r"^(thd_|fa_prepare|fused_attn|get_fused_attn|copy_to_kv|convert_|fused_(qkv_)?rope|"
                        r"scaled_\w*softmax|multi_tensor_(transpose_to_bhsd|pad_last_dim)|get_cudnn_version)")


# ---- theirs ----

def members_of(source: str) -> dict[str, str | None]:
    """names_of a module, and of its classes the parameters of what they are made and called with: "C" has those of
    __init__, or a dataclass's fields, "C.method" those of a public method; None for what is no function."""
    names = peer_names.names_of(source)
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or node.name not in names:
            continue
        made = " ".join(ast.unparse(each) for each in node.decorator_list)
        if "dataclass" in made:
            names[node.name] = "*, " * ("kw_only=True" in made) + ", ".join(
                f"{field.target.id}" + (f"={ast.unparse(field.value)}" if field.value else "")
                for field in node.body if isinstance(field, ast.AnnAssign))
        for each in node.body:
            if not isinstance(each, ast.FunctionDef) or each.name.startswith("_") and each.name != "__init__":
                continue
            decorators = [ast.unparse(decorator) for decorator in each.decorator_list]
            if any("property" in text or "setter" in text for text in decorators):
                names[f"{node.name}.{each.name}"] = None
                continue
            if "staticmethod" not in decorators:
                del each.args.args[0]
            key = node.name if each.name == "__init__" else f"{node.name}.{each.name}"
            names[key] = peer_names.parameters_of(each.args)
    return names


def download(folder: Path, *what: str):
    """pip's download of packages to `folder`; CalledProcessError where there is no way to PyPI."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "1", "--timeout", "15"]
    subprocess.run([*pip, "--dest", str(folder), *what], check=True, capture_output=True, timeout=120)


def python_of(folder: Path, version: str = VERSION) -> Path:
    """The wheel with TransformerEngine's Python, in `folder`."""
    download(folder, f"transformer_engine=={version}")
    return next(folder.glob("transformer_engine-*.whl"))


def fetch(folder: Path, version: str = VERSION) -> dict:
    """{"version": ..., module: names} from PyPI; CalledProcessError where there is no way to it."""
    download(folder, "--no-build-isolation", "--no-binary", ":all:", f"{EXTENSION}=={version}")
    found = {"version": version}
    with zipfile.ZipFile(python_of(folder, version)) as wheel:
        files = set(wheel.namelist())
        for module in MODULES:
            path = "transformer_engine/" + module.replace(".", "/")
            file = f"{path}.py" if f"{path}.py" in files else f"{path}/__init__.py"
            found[module] = members_of(wheel.read(file).decode())
    with tarfile.open(next(folder.glob(f"{EXTENSION}-*.tar.gz"))) as sources:
        text = sources.extractfile(f"{EXTENSION}-{version}/csrc/extensions/pybind.cpp").read().decode()
    functions = re.findall(r'm\.def\(\s*"(\w+)"', text)
    found[EXTENSION] = {name: None for name in sorted(functions) if _ATTENTION.match(name)}
    return found


# ---- ours, and the difference ----

def ours(module: str):
    """Our module, or None."""
    try:
        return importlib.import_module(f"tessera.te.{module}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("tessera.te"):
            raise
        return None


def found(module: str, name: str):
    """Our object of that name; None where there is none."""
    here = ours(module)
    for part in name.split("."):
        here = getattr(here, part, None)
    return here


def missing(module: str, names) -> list[str]:
    """Names that are not here; methods of classes that are not here are not named."""
    absent = [name for name in names if not _has(module, name)]
    return [name for name in absent if "." not in name or _has(module, name.split(".")[0])]


def _has(module: str, name: str) -> bool:
    here = ours(module)
    for part in name.split("."):
        if part in ("forward", "backward") and hasattr(here, "apply"):  # by which alone they are called
            return True
        if here is None or not hasattr(here, part):
            return False
        here = getattr(here, part)
    return True


def different(module: str, names) -> list[str]:
    """"name: what" of signatures that would bind a call otherwise than theirs: a parameter of theirs that ours has
    not, has in another place, or with another default of a constant."""
    lines = []
    for name, theirs in names.items():
        mine = _parameters(module, name) if theirs is not None else None
        if mine is None:
            continue
        free = [any(p.kind is kind for p in mine.values()) for kind in (inspect.Parameter.VAR_KEYWORD,
                                                                        inspect.Parameter.VAR_POSITIONAL)]
        args = ast.parse(f"def f({theirs}): pass").body[0].args
        positional = [each.arg for each in [*args.posonlyargs, *args.args]]
        order = [p.name for p in mine.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        what = []
        theirs_all = [*positional, *[k.arg for k in args.kwonlyargs]]
        lacking = [each for each in theirs_all if each not in mine and not free[0] and
                   not (free[1] and each in positional)]
        if lacking:
            what.append(f"without {', '.join(lacking)}")
        kept = [each for each in positional if each not in lacking]
        moved = [each for i, each in enumerate(kept) if not free[1] and (i >= len(order) or order[i] != each)
                 and each in mine]
        if moved:
            what.append(f"another place of {moved[0]}")
        what += _defaults(args, positional, mine)
        lines += [f"{name}: {'; '.join(what)}"] if what else []
    return lines


def _defaults(args: ast.arguments, positional, mine) -> list[str]:
    given = dict(zip(positional[len(positional) - len(args.defaults):], args.defaults))
    given.update({k.arg: d for k, d in zip(args.kwonlyargs, args.kw_defaults) if d is not None})
    lines = []
    for name, node in given.items():
        if name not in mine:
            continue
        default = mine[name].default
        if isinstance(node, ast.Attribute):  # a member of an enumeration, by its name; of other things nothing is said
            same, theirs = not isinstance(default, enum.Enum) or default.name == node.attr, ast.unparse(node)
        else:
            try:
                value = ast.literal_eval(node)
            except ValueError:
                continue
            same, theirs = type(default) is type(value) and default == value or default == value is not None, \
                repr(value)
        if not same or default is inspect.Parameter.empty:
            shown = "none" if default is inspect.Parameter.empty else repr(default)
            lines.append(f"{name}={shown} for {theirs}")
    return lines


def _parameters(module: str, name: str):
    mine = found(module, name)
    if not callable(mine):
        return None
    try:
        parameters = dict(inspect.signature(mine).parameters)
    except (TypeError, ValueError):
        return None
    first = next(iter(parameters), None)
    if "." in name and first in ("self", "cls"):
        del parameters[first]
    return parameters


def table(record: dict) -> str:
    """The table of docs/te.md."""
    lines = [f"Of TransformerEngine {record['version']}:", "", "| module | names here | not here | called otherwise |",
             "|---|---|---|---|"]
    for module in (*MODULES, EXTENSION):
        names = record[module]
        public = [name for name in names if "." not in name]
        absent = missing(module, names)
        if ours(module) is None:
            text = "the module: " + ", ".join(f"`{name}`" for name in public)
        else:
            text = ", ".join(f"`{name}`" for name in absent) or "none"
        here = len(public) - sum(name in public for name in absent)
        otherwise = "; ".join(line.replace("|", "/") for line in different(module, names)) or "none"
        lines.append(f"| `{module}` | {here} of {len(public)} | {text} | {otherwise} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, record: dict) -> str:
    return peer_names.replaced(page, BEGIN, END, table(record))


def reports(record: dict):
    for module in (*MODULES, EXTENSION):
        names = record[module]
        yield f"{module}: {len(names)} names" + (", no module here" if ours(module) is None else ""), \
            missing(module, names), different(module, names)


if __name__ == "__main__":
    peer_names.command(sys.modules[__name__], __doc__, reports)
