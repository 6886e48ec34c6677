#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Public names and signatures of flash-attn, FlashAttention 3's interface and xformers.ops beside ours.

    python tools/peers/peer_names.py             fetch the newest sources from PyPI, print what is missing here
    python tools/peers/peer_names.py --record    also write docs/data/peer_names.json and the table in docs/migrating.md
    python tools/peers/peer_names.py --recorded  print what is missing of the recorded ones, offline

The peers are read, never imported: their modules want a GPU. tests/python/house/test_peer_names.py holds the table.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "data" / "peer_names.json"
PAGE = ROOT / "docs" / "migrating.md"
BEGIN, END = "<!-- peer_names: begin -->\n", "<!-- peer_names: end -->\n"
# Their module: (package, file in it, our module).
MODULES = {
    "flash_attn": ("flash-attn", "flash_attn/__init__.py", "tessera.flash_attn"),
    "flash_attn.flash_attn_interface": ("flash-attn", "flash_attn/flash_attn_interface.py",
                                        "tessera.flash_attn.flash_attn_interface"),
    "flash_attn.bert_padding": ("flash-attn", "flash_attn/bert_padding.py", "tessera.flash_attn.bert_padding"),
    "flash_attn.layers.rotary": ("flash-attn", "flash_attn/layers/rotary.py", "tessera.flash_attn.layers.rotary"),
    "flash_attn_interface": ("flash-attn", "hopper/flash_attn_interface.py", "tessera.flash_attn_interface"),
    "flash_attn.cute": ("flash-attn-4", "flash_attn/cute/__init__.py", "tessera.flash_attn.cute"),
    "flash_attn.cute.interface": ("flash-attn-4", "flash_attn/cute/interface.py",
                                  "tessera.flash_attn.cute.interface"),
    "xformers.ops": ("xformers", "xformers/ops/__init__.py", "tessera.xformers"),
    "xformers.ops.fmha": ("xformers", "xformers/ops/fmha/__init__.py", "tessera.xformers.fmha"),
    "xformers.ops.fmha.common": ("xformers", "xformers/ops/fmha/common.py", "tessera.xformers.fmha.common"),
    "xformers.ops.fmha.attn_bias": ("xformers", "xformers/ops/fmha/attn_bias.py", "tessera.xformers.fmha.attn_bias"),
    "xformers.ops.fmha.merge_training": ("xformers", "xformers/ops/fmha/merge_training.py",
                                         "tessera.xformers.fmha.merge_training"),
    "xformers.ops.fmha.triton_splitk": ("xformers", "xformers/ops/fmha/triton_splitk.py",
                                        "tessera.xformers.fmha.triton_splitk"),
    "xformers.ops.tree_attention": ("xformers", "xformers/ops/tree_attention.py", "tessera.xformers.tree_attention"),
}
WHEELS = {"flash-attn-4"}  # packages that have nothing else, and no release that is not a preview
# Names of one underscore that programs call all the same.
PRIVATE = {"_flash_attn_forward", "_flash_attn_backward", "_flash_attn_varlen_forward", "_flash_attn_varlen_backward"}


# ---- theirs ----

def names_of(source: str) -> dict[str, str | None]:
    """Public names of a module's text: a function's parameters, None for anything else. Imports count where the
    module has nothing but them, or lists them in __all__."""
    body = ast.parse(source).body
    own, imported, listed = {}, {}, []
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            own[node.name] = parameters_of(node.args)
        elif isinstance(node, ast.ClassDef):
            own[node.name] = None
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == "__all__":
                    listed = ast.literal_eval(node.value)
                elif isinstance(target, ast.Name):
                    own[target.id] = None
        elif isinstance(node, ast.ImportFrom):
            imported.update({alias.asname or alias.name: None for alias in node.names})
    functions = any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in body)
    names = own if functions and not listed else own | imported
    wanted = listed or [name for name in names if not name.startswith("_") or name in PRIVATE | {"__version__"}]
    return {name: names.get(name) for name in sorted(wanted)}


def parameters_of(arguments: ast.arguments) -> str:
    """Parameters with their defaults, without annotations."""
    for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs,
                 *filter(None, (arguments.vararg, arguments.kwarg))]:
        each.annotation = None
    return ast.unparse(arguments)


def fetch(folder: Path) -> dict:
    """{module: {"version": ..., "names": ...}} of the newest packages of PyPI, as sources where there are any."""
    packages = {package for package, _, _ in MODULES.values()}
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*download, "--no-build-isolation", "--no-binary", ":all:", *sorted(packages - WHEELS)], check=True)
    subprocess.run([*download, "--pre", *sorted(packages & WHEELS)], check=True)
    found = {}
    for module, (package, file, _) in MODULES.items():
        name = package.replace("-", "_")
        if package in WHEELS:
            archive = next(folder.glob(f"{name}-*.whl"))
            version = archive.name.split("-")[1]
            with zipfile.ZipFile(archive) as parts:
                text = parts.read(file).decode()
        else:
            archive = next(folder.glob(f"{name}-*.tar.gz"))
            top = archive.name.removesuffix(".tar.gz")
            version = top.rpartition("-")[2]
            with tarfile.open(archive) as sources:
                text = sources.extractfile(f"{top}/{file}").read().decode()
        found[module] = {"version": version, "names": names_of(text)}
    return found


# ---- ours, and the difference ----

def missing(module: str, names) -> list[str]:
    """Names that our module has not."""
    ours = importlib.import_module(MODULES[module][2])
    return [name for name in names if not hasattr(ours, name)]


def different(module: str, names) -> list[str]:
    """Functions whose parameters do not begin with theirs, defaults included."""
    ours = importlib.import_module(MODULES[module][2])
    lines = []
    for name, theirs in names.items():
        function = getattr(ours, name, None)
        if theirs is None or not inspect.isfunction(function):
            continue
        mine = inspect.signature(function)
        bare = mine.replace(parameters=[p.replace(annotation=p.empty) for p in mine.parameters.values()],
                            return_annotation=mine.empty)
        if not normal(str(bare)[1:-1]).startswith(normal(theirs).removesuffix("):\n    pass")):
            lines.append(f"{name}: theirs ({theirs}), ours {bare}")
    return lines


def normal(parameters: str) -> str:
    """One spelling of each default."""
    return ast.unparse(ast.parse(f"def f({parameters}): pass")).replace("torch.bfloat16", "bfloat16")


def table(record: dict) -> str:
    """The table of docs/migrating.md."""
    lines = ["| module of theirs | ours | names here | not here |", "|---|---|---|---|"]
    for module, (package, _, ours) in MODULES.items():
        names = record[module]["names"]
        absent = missing(module, names)
        lines.append(f"| `{module}` ({package} {record[module]['version']}) | `{ours}` | {len(names) - len(absent)} of "
                     f"{len(names)} | {', '.join(f'`{name}`' for name in absent) or 'none'} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, record: dict) -> str:
    return replaced(page, BEGIN, END, table(record))


def replaced(page: str, begin: str, end: str, text: str) -> str:
    """A page with other text between two marks."""
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return before + begin + text + end + after


def command(names, about: str, reports: Callable[[dict], Iterable[tuple[str, list[str], list[str]]]]):
    """The command line of a module `names` like this one, which `about` describes. reports(record) has, for each
    module, a headline, the names that are missing and those that bind otherwise."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true",
                        help=f"write {names.RECORD.relative_to(ROOT)} and the table of {names.PAGE.relative_to(ROOT)}")
    parser.add_argument("--recorded", action="store_true", help="compare what was recorded, offline")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "python"))
    if options.recorded:
        record = json.loads(names.RECORD.read_text())
    else:
        with tempfile.TemporaryDirectory() as folder:
            record = names.fetch(Path(folder))
    if options.record:
        names.RECORD.write_text(json.dumps(record, indent=1) + "\n")
        names.PAGE.write_text(names.with_table(names.PAGE.read_text(), record))
    for headline, absent, otherwise in reports(record):
        print(headline)
        for line in [f"missing {name}" for name in absent] + [f"differs {line}" for line in otherwise]:
            print(f"    {line}")


def reports(record: dict):
    for module, found in record.items():
        names = found["names"]
        yield f"{module} {found['version']}: {len(names)} names", missing(module, names), different(module, names)


if __name__ == "__main__":
    command(sys.modules[__name__], __doc__, reports)
