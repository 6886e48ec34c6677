#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Calls of other libraries in docs/migrating.md beside the signatures of these libraries.

    python tools/peers/peer_calls.py            print what does not bind, offline
    python tools/peers/peer_calls.py --record   fetch FlashInfer, cuDNN's front end and TransformerEngine from PyPI, and
                                                write what the page calls of them to docs/data/peer_calls.json

A comment of the page's code that parses is a line of the other library. FlashInfer and TransformerEngine are read,
never imported: they want a GPU. cuDNN's front end says its signatures only when it is imported, which needs none.
tests/python/house/test_peer_calls.py holds the page.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import peer_names
import te_names

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "data" / "peer_calls.json"
PAGE = ROOT / "docs" / "migrating.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Their module: (package, {file in its wheel: names of it that the page calls}).
CALLED = {
    "flashinfer": ("flashinfer-python", {
        "flashinfer/prefill.py": ("single_prefill_with_kv_cache", "BatchPrefillWithPagedKVCacheWrapper"),
        "flashinfer/decode.py": ("BatchDecodeWithPagedKVCacheWrapper",),
        "flashinfer/cascade.py": ("merge_state",)}),
    "cudnn": ("nvidia-cudnn-frontend", {"cudnn/_pygraph.py": ("pygraph",)}),
    "transformer_engine.pytorch": (f"transformer_engine=={te_names.VERSION}", {
        "transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py":
            ("DotProductAttention",)}),
}
# Head of the first column of a table whose names are parameters: the functions that have them.
TABLES = {"FlashInfer": "flashinfer.", "`graph.sdpa`": "cudnn.pygraph.sdpa",
          "`DotProductAttention(...)`, `forward(...)`": "transformer_engine.pytorch.DotProductAttention"}
# What FlashAttention 3's repository has, and the source package of flash-attn not yet.
LATER = {"flash_attn_interface.flash_attn_func": ", return_attn_probs=False"}
# Makes a graph of cuDNN's front end say what its Python class takes as **kwargs.
CUDNN = """
import cudnn, json
from cudnn import _compiled_module
said = {name: getattr(_compiled_module.backend_graph, name).__doc__.splitlines()[0]
        for name in ("sdpa", "sdpa_backward")}
print(json.dumps([said, [f"{name}.{each}" for name in ("diagonal_alignment", "data_type")
                         for each in getattr(cudnn, name).__members__]]))
"""


# ---- theirs ----

def fetch(folder: Path) -> dict:
    """{module: {"version": ..., "names": ...}} of the newest wheels of PyPI, of TransformerEngine that of te_names."""
    found = {}
    for module, (package, files) in CALLED.items():
        te_names.download(folder, package)
        file = next(folder.glob(package.split("=")[0].replace("-", "_") + "-*.whl"))
        with zipfile.ZipFile(file) as wheel:
            names = {name: parameters for path, wanted in files.items()
                     for name, parameters in te_names.members_of(wheel.read(path).decode()).items()
                     if name.split(".")[0] in wanted}
            if module == "cudnn":
                wheel.extractall(folder / "cudnn")
                names |= cudnn_names(folder / "cudnn")
        found[module] = {"version": file.name.split("-")[1], "names": dict(sorted(names.items()))}
    return found


def cudnn_names(folder: Path) -> dict[str, str | None]:
    """Operations of a graph and members of enums, of cuDNN's front end in `folder`."""
    done = subprocess.run([sys.executable, "-c", CUDNN], check=True, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(folder)})
    said, members = json.loads(done.stdout)
    names = dict.fromkeys(members)
    for name, line in said.items():
        arguments = ast.parse(f"def {line}: pass").body[0].args
        del arguments.args[0]
        names[f"pygraph.{name}"] = peer_names.parameters_of(arguments)
    return names


def known(record: dict) -> dict[str, str | None]:
    """{dotted name: parameters, None where it is no function or they are not recorded}, flash-attn's and xformers' from
    the record of peer_names."""
    names = {f"{module}.{name}": parameters
             for module, found in [*json.loads(peer_names.RECORD.read_text()).items(), *record.items()]
             for name, parameters in found["names"].items()}
    for name in [name for name, parameters in names.items() if parameters is None]:  # a package has it of a module
        package, _, last = name.rpartition(".")
        names[name] = next((parameters for other, parameters in names.items() if parameters is not None and
                            other.startswith(f"{package}.") and other.endswith(f".{last}")), None)
    return names | {name: names[name] + more for name, more in LATER.items()}


# ---- the page ----

def uncommented(code: str) -> tuple[str, set[int]]:
    """A block with comments that are code as code, and the numbers of their lines. What stands behind two blanks of
    such a comment is prose."""
    lines, theirs = code.splitlines(), set()
    at = 0
    while at < len(lines):
        end = at
        while end < len(lines) and lines[end].startswith("# "):
            end += 1
        run = [re.sub(r"(?<=\S) {2,}\S.*", "", line[2:]) for line in lines[at:end]]
        if is_code("\n".join(run)):
            lines[at:end] = run
            theirs.update(range(at + 1, end + 1))
        at = max(end, at + 1)
    return "\n".join(lines), theirs


def is_code(text: str) -> bool:
    """True for imports, assignments and calls: a word of prose would parse too."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return False
    return bool(body) and all(isinstance(each, (ast.Import, ast.ImportFrom, ast.Assign)) or
                              isinstance(each, ast.Expr) and isinstance(each.value, ast.Call) for each in body)


def signature(parameters: str) -> inspect.Signature:
    """A signature to bind to: defaults do not matter, and may be names of theirs."""
    arguments = ast.parse(f"def f({parameters}): pass").body[0].args
    for defaults in (arguments.defaults, arguments.kw_defaults):
        defaults[:] = [default and ast.Constant(None) for default in defaults]
    place: dict = {}
    exec(f"def f({ast.unparse(arguments)}): pass", place)
    return inspect.signature(place["f"])


class Block(ast.NodeVisitor):
    """A block of code that calls other libraries: `called` are their functions that it calls, `wrong` is what they
    would not take."""

    def __init__(self, code: str, names: dict[str, str | None]):
        self.names, self.called, self.wrong = names, set(), []
        self.stands_for: dict[str, str] = {}  # a name of the block: theirs, or the class that it is an instance of
        self.instances: set[str] = set()
        text, self.theirs = uncommented(code)
        self.roots = {name.split(".")[0] for name in names} | {"graph", "wrapper"}
        for number, line in enumerate(text.splitlines(), 1):
            word = re.match(rf"#.*?\b(?:{'|'.join(self.roots)})\.\w+", line)
            if word and number not in self.theirs:
                self.wrong.append(f"line {number} names another library and is no code: {line}")
        self.defined = set(dir(builtins))
        for statement in ast.parse(text).body:
            self.visit(statement)
            self.defined |= {node.id for node in ast.walk(statement)
                             if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            self.defined |= {getattr(node, "name", None) for node in ast.walk(statement)
                             if isinstance(node, (ast.FunctionDef, ast.ClassDef))}

    def of_theirs(self, node: ast.expr) -> str | None:
        """The dotted name that an expression stands for."""
        if isinstance(node, ast.Name):
            return self.stands_for.get(node.id)
        above = self.of_theirs(node.value) if isinstance(node, ast.Attribute) else None
        return above and f"{above}.{node.attr}"

    def has_members(self, name: str) -> bool:
        return any(other.startswith(f"{name}.") for other in self.names)

    def must_have(self, name: str, line: int):
        """A name of theirs is recorded, or belongs to one whose members are not."""
        above = name.rpartition(".")[0]
        if not (name in self.names or self.has_members(name) or above in self.names and not self.has_members(above)):
            self.wrong.append(f"line {line}: {name} does not exist")

    def visit_Import(self, node: ast.Import):
        for alias in node.names:
            mine = alias.asname or alias.name.split(".")[0]
            self.defined.add(mine)
            if node.lineno in self.theirs:
                self.must_have(alias.name, node.lineno)
                self.stands_for[mine] = alias.name if alias.asname else mine

    def visit_ImportFrom(self, node: ast.ImportFrom):
        for alias in node.names:
            self.defined.add(alias.asname or alias.name)
            if node.lineno in self.theirs:
                name = f"{node.module}.{alias.name}"
                self.must_have(name, node.lineno)
                self.stands_for[alias.asname or alias.name] = name

    def visit_Assign(self, node: ast.Assign):
        self.generic_visit(node)
        made = isinstance(node.value, ast.Call) and self.of_theirs(node.value.func)
        if made and self.has_members(made) and isinstance(node.targets[0], ast.Name):
            self.stands_for[node.targets[0].id] = made
            self.instances.add(node.targets[0].id)

    def visit_Attribute(self, node: ast.Attribute):
        self.generic_visit(node)
        name = self.of_theirs(node)
        if name:
            self.must_have(name, node.lineno)

    def visit_Name(self, node: ast.Name):
        if node.lineno in self.theirs and isinstance(node.ctx, ast.Load) and node.id not in self.defined:
            self.wrong.append(f"line {node.lineno}: {node.id} is not defined before")

    def visit_Call(self, node: ast.Call):
        self.generic_visit(node)
        name = self.of_theirs(node.func)
        if not name:
            return
        if isinstance(node.func, ast.Name) and node.func.id in self.instances:
            name += ".forward"
        self.called.add(name)
        if any(isinstance(each, ast.Starred) for each in node.args) or any(each.arg is None for each in node.keywords):
            return  # as many as the caller has
        if self.names.get(name) is not None:
            try:
                signature(self.names[name]).bind(*node.args, **{each.arg: each.value for each in node.keywords})
            except TypeError as error:
                self.wrong.append(f"line {node.lineno}: {name}: {error}")


def wrong_of_tables(page: str, names: dict[str, str | None]) -> list[str]:
    """Names in the first column of TABLES that no function of theirs has as a parameter."""
    wrong = []
    for head, prefix in TABLES.items():
        rows = page.split(f"\n| {head} |")[1].split("\n\n")[0].splitlines()[2:]
        parameters = {each for name, text in names.items() if name.startswith(prefix) and text is not None
                      for each in signature(text).parameters}
        words = [word for row in rows for word in re.findall(r"`(\w+)(?:=[^`]*)?`", row.split(" | ")[0])]
        wrong += [f"{head}: {word} is no parameter" for word in words if word not in parameters]
    return wrong


def blocks(page: str, record: dict) -> list[Block]:
    names = known(record)
    return [Block(code, names) for code in BLOCK.findall(page)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    if parser.parse_args().record:
        with tempfile.TemporaryDirectory() as folder:
            RECORD.write_text(json.dumps(fetch(Path(folder)), indent=1) + "\n")
    page, record = PAGE.read_text(), json.loads(RECORD.read_text())
    wrong = [line for block in blocks(page, record) for line in block.wrong] + wrong_of_tables(page, known(record))
    print("\n".join(wrong) or "every call binds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
