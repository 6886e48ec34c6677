# SPDX-License-Identifier: Apache-2.0
"""The house is in order: layers point down, documents name what exists, their code runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = sorted(path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
PATH = re.compile(r"`((?:src|tests|tools|docs|examples|python|include|bench)/[\w./-]+)`")
SHORT_PATH = re.compile(r"(?<![\w/.<>-])((?:[a-z0-9_]+/)+[a-z0-9_]+\.(?:h|cc|c|cuh|cu|py|def|cmake|sh|cases))\b")
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
SOURCES = [name for name in TRACKED if re.search(r"\.(h|cc|c|cuh|cu|def)$", name)]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("tool", [["check_layers.py"], ["sizes.py"], ["gen_support.py", "--check"],
                                  ["cp_table.py", "--check"]],
                         ids=lambda tool: tool[0])
def test_tool_finds_nothing(tool):
    done = subprocess.run([sys.executable, ROOT / "tools" / tool[0], *tool[1:]],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_layer_check_sees_a_violation(tmp_path, monkeypatch):
    sys.path.insert(0, str(ROOT / "tools"))
    import check_layers

    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "bad.h").write_text('#include "cpu/pool.h"\n')
    monkeypatch.setattr(check_layers, "SOURCE", tmp_path)
    assert len(check_layers.violations()) == 1


@pytest.mark.parametrize(("file", "included", "said"), [
    ("score/bias.cuh", "forward/schedule.cuh", "score of cuda/sm90 may include only machine"),
    ("forward/host.cc", "backward/params.h", "forward of cuda/sm90 may include only machine, score"),
    ("backward/host.cc", "dbias/kernel.cuh", "backward of cuda/sm90 may include only dbias/host, forward"),
    ("new/host.cc", "machine/ptx.cuh", "cuda/sm90 has no row for new"),
    ("backward/host.cc", "dbias/host.h", None),
    ("backward/host.cc", "plan.h", None),
    ("rules.cc", "fp8/choice.h", None),
    ("fp8/kernel.cuh", "forward/score/features.cuh", None),
])
def test_layer_check_looks_inside_a_backend(tmp_path, monkeypatch, file, included, said):
    sys.path.insert(0, str(ROOT / "tools"))
    import check_layers

    at = tmp_path / "cuda/sm90" / file
    at.parent.mkdir(parents=True)
    at.write_text(f'#include "cuda/sm90/{included}"\n')
    monkeypatch.setattr(check_layers, "SOURCE", tmp_path)
    found = check_layers.violations()
    assert not found if said is None else len(found) == 1 and said in found[0]


PACKAGE = {"__init__.py": "", "_lib.py": "", "torch/__init__.py": "from .. import _lib", "torch/_a.py": "",
           "torch/_b.py": "", "jax/__init__.py": "import tessera._lib",
           "te/__init__.py": "from ..torch import _a", "te/_b.py": "from . import x"}


@pytest.mark.parametrize(("module", "code", "said"), [
    ("torch/_a.py", "import os", None),
    ("torch/_a.py", "def f():\n    from ..jax import attention", "torch/_a.py:2 imports tessera.jax: torch may import"),
    ("torch/_a.py", "from tessera.te import x", "torch/_a.py:1 imports tessera.te: torch may import"),
    ("_lib.py", "from . import torch", "_lib.py:1 imports tessera.torch: tessera may import"),
    ("torch/_a.py", "from . import attention", None),
    ("torch/__init__.py", "from ._a import f", None),
    ("te/__init__.py", "from ._b import f", "imports go round: tessera.te -> tessera.te._b -> tessera.te"),
    ("torch/_b.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .. import te", None),
])
def test_layer_check_sees_imports(tmp_path, module, code, said):
    sys.path.insert(0, str(ROOT / "tools"))
    import python_layers

    for name, text in {**PACKAGE, module: code}.items():
        (tmp_path / "tessera" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tessera" / name).write_text(text)
    found = python_layers.violations(tmp_path)
    assert bool(found) == (said is not None) and (said or "") in "".join(found), found


def test_import_check_sees_a_late_circle(tmp_path):
    sys.path.insert(0, str(ROOT / "tools"))
    import python_layers

    late = {"torch/_a.py": "from ._b import x", "torch/_b.py": "def f():\n    from . import _a"}
    for name, text in {**PACKAGE, **late}.items():
        (tmp_path / "tessera" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tessera" / name).write_text(text)
    assert python_layers.violations(tmp_path) == [
        "imports go round: tessera.torch._a -> tessera.torch._b -> tessera.torch._a"]


def test_size_check_sees_a_crowded_folder():
    sys.path.insert(0, str(ROOT / "tools"))
    import sizes

    names = [f"src/core/{i}.cc" for i in range(16)] + [f"src/cpu/{i}.cc" for i in range(15)] + \
            [f"tests/python/{i}.py" for i in range(99)] + [f"docs/lab/{i}.md" for i in range(99)]
    assert sizes.crowded_folders(names) == [("src/core", 16), ("tests/python", 99)]
    assert all(len(list((ROOT / folder).glob("*.*"))) > 15 for folder in sizes.CROWDED)


@pytest.fixture(scope="module")
def made_pages():
    """Pages of the site that the code makes."""
    sys.path.insert(0, str(ROOT / "tools" / "site"))
    import reference

    return {ROOT / "docs" / path for path in reference.pages()}


SHORT, LONG = "  step();\n", "  step();\n" * 80
FUNCTIONS = {
    "a.cc": [
        # head, body, what is too long
        ("int f(int a) {", LONG, "f"), ("int f(int a) {", SHORT, None),
        ("template <typename T, class F>\nvoid A::f(T t, F f) const noexcept {", LONG, "A::f"),
        ("A::A(int a) : a_(a), b_{1} {", LONG, "A::A"),
        ("struct A {", LONG, None), ("namespace a {", LONG, None), ("constexpr Row kRows[] = {", LONG, None),
        ("constexpr Row kRows[] = {{1, [](int a) {", LONG + "}}\n", "a lambda"),
        ("int f(char a = '{') {\n  // {\n  g(\"}\");", LONG, "f"),
    ],
    "a.cuh": [
        ("__device__ void f(int a) {", LONG, "f"), ("__device__ void consumer(int a) {", LONG, None),
        ("__global__ void __launch_bounds__(32 * f(2))\n    f(const __grid_constant__ A a) {", LONG, None),
        ("__global__ void f(int a) {", LONG * 5, "f"),
    ],
    "a.py": [
        ("def f(a):", LONG.replace(";", ""), "f"), ("def f(a):", SHORT.replace(";", ""), None),
        ("class A:\n  async def f(a):", LONG.replace(";", "").replace("  ", "    "), "f"),
    ],
}


@pytest.mark.parametrize(("name", "head", "body", "found"),
                         [(name, *each) for name, all in FUNCTIONS.items() for each in all])
def test_size_check_sees_a_long_function(tmp_path, name, head, body, found):
    sys.path.insert(0, str(ROOT / "tools"))
    import sizes

    (tmp_path / name).write_text(f"\n{head}\n{body}" + ("" if name.endswith("py") else "}\n"))
    assert [function.name for function, _ in sizes.long_functions(tmp_path / name)] == ([found] if found else [])


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_and_paths_exist(document, made_pages):
    text = document.read_text()
    places = {link: (document.parent / link).resolve() for link in LINK.findall(text) if "://" not in link}
    missing = [link for link, place in places.items() if not place.exists() and place not in made_pages]
    missing += [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    assert not missing, f"{name_of(document)} names {missing}, which do not exist"


# Names of files that other projects have.
OF_OTHERS = {"xla/ffi/api/c_api.h"}


def test_short_paths_in_comments_exist():
    if not TRACKED:
        pytest.skip("not a checkout: git lists no files")
    ends = {"/".join(parts[i:]) for parts in map(lambda name: name.split("/"), TRACKED) for i in range(len(parts))}
    # Tests of Python write paths of trees that they make, tools/peers has those of other projects.
    folders = re.compile(r"(python|benchmarks|examples|tools/(?!peers)\w+|tests/cuda)/.*\.py$")
    of_python = list(filter(folders.match, TRACKED))
    missing = [f"{name}:{number}: {path}" for name in SOURCES + of_python
               for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
               for path in SHORT_PATH.findall(line) if path not in ends | OF_OTHERS]
    missing += [f"{name_of(document)}: {path}" for document in DOCUMENTS if "kernels" in document.parts
                for path in SHORT_PATH.findall(document.read_text()) if path not in ends]
    assert not missing, missing


def test_tables_in_comments_stay_tables():
    """clang-format would pour the lines of a table into one another."""
    assert "ReflowComments: false" in (ROOT / ".clang-format").read_text().splitlines()


def test_lines_end_before_column_121():
    """Comments too, which clang-format leaves as they are; ruff holds Python's."""
    if not TRACKED:
        pytest.skip("not a checkout: git lists no files")
    long = [f"{name}:{number}" for name in SOURCES
            for number, line in enumerate((ROOT / name).read_text().splitlines(), 1) if len(line) > 120]
    assert not long, long


def test_docstrings_begin_with_what_they_speak_of():
    """Not with whose it is: "Of one batch" leaves open what."""
    begun = [f"{name}: {line}" for name in TRACKED if name.endswith(".py")
             for line in re.findall(r'^ *"{3}Of .*', (ROOT / name).read_text(), re.MULTILINE)]
    assert not begun, begun


@pytest.mark.parametrize("name", ["cpu.json", "hopper.json"])
def test_plotted_figures_are_those_of_the_tables(name):
    """A plot's data has the times that docs/performance.md shows beside the same case."""
    shown = {case: cells.split("|") for case, cells in
             re.findall(r"^\| `([^`]+)` \|(.+)\|$", (ROOT / "docs/performance.md").read_text(), re.MULTILINE)[::-1]}
    saved = json.loads((ROOT / "docs/data" / name).read_text())
    assert len(saved) > 20
    for entry in saved:
        times = [entry["ms"], *(peer["ms"] for peer in entry["peers"].values())]
        cells = {float(cell) for cell in shown[entry["case"]] if re.fullmatch(r" [\d.]+ ", cell)}
        assert set(times) <= cells, entry["case"]


@pytest.mark.parametrize("name", ["cpu.json", "cpu_scaling.json"])
def test_a_table_of_the_cpu_is_its_data(name):
    """Each cell of the last table before the plot of a file is that file's number, rounded as the table rounds."""
    page = (ROOT / "docs/performance.md").read_text()
    before = re.split(rf"```plot\n\w+ data/{re.escape(name)}", page, maxsplit=1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(
        r"^(?:\|.*\|\n)+", before, re.MULTILINE)[-1].splitlines()]
    saved = {entry["case"]: entry for entry in json.loads((ROOT / "docs/data" / name).read_text())}
    assert len(rows) > 10
    for case, *cells in rows[2:]:
        entry = saved[case.strip("`")]
        torch = entry["peers"]["torch"]
        columns = {"ms": entry["ms"], "fastest": entry["min_ms"], "TFLOP/s": entry["tflops"], "torch ms": torch["ms"],
                   "% of peak": entry.get("percent_of_peak"), "x torch": torch["times"]}
        for column, cell in zip(rows[0][1:], cells, strict=True):
            number, of_memory, _ = cell.partition(" of DRAM")
            value = entry["percent_of_bandwidth"] if of_memory else columns[column]
            digits = len(number.partition(".")[2])
            assert abs(value - float(number)) <= 0.51 * 10.0**-digits, (case, column, value)


VARIABLE = re.compile(r'["\'`](TESSERA_[A-Z_]+)["\'`]')
READS = re.compile(r"(?:variable|getenv|environ\.get|environ\[|environ:|in os\.environ|switch)|^[A-Z_]+ = ")


def test_every_variable_is_on_its_page():
    """What the sources read of the environment, and no more, is a row of docs/environment.md."""
    rows = re.findall(r"^\| `(TESSERA_\w+)` \|", (ROOT / "docs/environment.md").read_text(), re.MULTILINE)
    sources = [path for folder in ("src", "python", "tests/python") for path in (ROOT / folder).rglob("*")
               if path.suffix in (".py", ".cc", ".h") and path != Path(__file__)]
    read = {name for path in sources for line in path.read_text().splitlines() if READS.search(line)
            for name in VARIABLE.findall(line)}
    assert read == set(rows) and len(rows) == len(set(rows))


def test_a_table_of_errors_says_what_is_said():
    """Each text of docs/faq.md's table is in the sources; … is what a message fills in."""
    texts = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/faq.md").read_text(), re.MULTILINE)
    said = "".join(path.read_text() for folder in ("src", "python") for path in (ROOT / folder).rglob("*")
                   if path.suffix in (".py", ".cc", ".h"))
    said = re.sub(r'"\s*f?"', "", said)  # texts go on on the next line
    missing = [part for text in texts for part in text.split("…") if part not in said]
    assert len(texts) > 10 and not missing, missing


def python_blocks():
    for document in DOCUMENTS:
        for number, code in enumerate(BLOCK.findall(document.read_text())):
            yield pytest.param(code, id=f"{name_of(document)}-{number}")


@pytest.mark.parametrize("code", list(python_blocks()))
def test_python_block_runs(code, tmp_path, monkeypatch):
    if re.search(r"^import jax$", code, re.MULTILINE):
        pytest.importorskip("jax")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "<document>", "exec"), {"__name__": "document"})
