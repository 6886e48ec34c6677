# SPDX-License-Identifier: Apache-2.0
"""The house is in order: layers point down, documents name what exists, their code runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
PATH = re.compile(r"`((?:src|tests|tools|docs|examples|python|include|bench)/[\w./-]+)`")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("tool", [["check_layers.py"], ["sizes.py"], ["gen_support.py", "--check"]],
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_and_paths_exist(document):
    text = document.read_text()
    missing = [link for link in LINK.findall(text)
               if "://" not in link and not (document.parent / link).exists()]
    missing += [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    assert not missing, f"{name_of(document)} names {missing}, which do not exist"


def python_blocks():
    for document in DOCUMENTS:
        for number, code in enumerate(BLOCK.findall(document.read_text())):
            yield pytest.param(code, id=f"{name_of(document)}-{number}")


@pytest.mark.parametrize("code", list(python_blocks()))
def test_python_block_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "<document>", "exec"), {"__name__": "document"})
