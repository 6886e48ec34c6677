# SPDX-License-Identifier: Apache-2.0
"""What modules of python/tessera import: packages downwards only, and no module itself, by whatever way round.

Imports inside functions count: they are late, not absent. Those for type checkers alone do not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "tessera"

# package -> the packages whose modules it may import, beside its own and the modules that lie beside the packages and
# `_call`. A package that is not in the table may import those alone, until it states more.
MAY_IMPORT = {
    "context_parallel": set(),
    "torch": {"context_parallel"},
    "jax": {"context_parallel"},
    "paddle": set(),
    "flash_attn": {"torch"},
    "xformers": {"torch"},
    "hf": {"torch", "context_parallel"},
    "te": {"torch", "jax", "paddle", "context_parallel"},
    "doors": {"torch", "flash_attn", "hf", "te"},
    "cli": {"torch", "jax", "paddle", "doors"},
    "demo": set(),
    "_call": set(),
    "__main__": {"cli", "demo"},
    "flash_attn_interface": {"flash_attn", "torch"},
}
# Imports that the tables forbid: what a framework's list calls by name, when it is asked to.
CALLED_BACK = {("torch._registry", "doors.flash_impl")}


def modules(root: Path) -> dict[str, Path]:
    """The modules below root by their names, without the package's own: "" is tessera/__init__.py."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root / PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, path: Path, known: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """(module, line) for each module of the package that a module imports; `from . import x` is x where it is a module,
    else the package that has it."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [part for part in package if part]

    def visit(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name.split(".")[1:], child.lineno, ()) for alias in child.names
                            if alias.name.split(".")[0] == PACKAGE)
            elif isinstance(child, ast.ImportFrom):
                base = child.module.split(".") if child.module else []
                names = [alias.name for alias in child.names]
                if child.level:
                    yield package[:len(package) - child.level + 1] + base, child.lineno, names
                elif base[0] == PACKAGE:
                    yield base[1:], child.lineno, names
            yield from visit(child)

    for base, line, names in visit(ast.parse(path.read_text())):
        targets = {".".join([*base, each]) for each in names}
        yield from ((target, line) for target in sorted(targets & known.keys()))
        if not names or targets - known.keys():
            yield ".".join(base), line


def room(name: str, known: dict[str, Path]) -> str:
    """"torch._ops" -> "torch"; "" for tessera itself and its modules that no package imports from below."""
    first = name.split(".")[0]
    is_package = first in known and known[first].name == "__init__.py"
    return first if is_package or first in MAY_IMPORT else ""


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Ways round: each from the module where it was found back to itself, no module in two."""
    found, done = [], set()

    def walk(name, way):
        if name in way:
            found.append([*way[way.index(name):], name])
        elif name not in done:
            for target in sorted(graph.get(name, ())):
                walk(target, [*way, name])
            done.add(name)

    for name in sorted(graph):
        walk(name, [])
    return found


def violations(root: Path = ROOT / "python") -> list[str]:
    known = modules(root)
    graph, found = {}, []
    for name, path in known.items():
        allowed = MAY_IMPORT.get(room(name, known), set()) | {"_call", "", room(name, known)}
        edges = {(target, line) for target, line in imported(name, path, known) if (name, target) not in CALLED_BACK}
        graph[name] = {target for target, _ in edges} - {name}
        rule = f"{room(name, known) or PACKAGE} may import only {', '.join(sorted(allowed - {''}))}"
        found += [f"{path.relative_to(root)}:{line} imports {PACKAGE}.{target}: {rule}"
                  for target, line in sorted(edges, key=lambda edge: edge[1]) if room(target, known) not in allowed]
    return found + [f"imports go round: {' -> '.join(f'{PACKAGE}.{name}' for name in way)}" for way in circles(graph)]
