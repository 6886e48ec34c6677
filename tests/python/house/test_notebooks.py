# SPDX-License-Identifier: Apache-2.0
"""Notebooks of examples/ run from the first cell to the last, with PyTorch and without it.

They are stored without outputs: figures of one machine would be read as promises, and a change of a cell would be
lost among changes of pictures."""

import os
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
for needed in ("ipykernel", "matplotlib"):
    pytest.importorskip(needed)

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None"


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


@pytest.fixture
def environment(monkeypatch):
    """The kernel is a process of its own: it finds tessera where this one does, and has one core, as the text says."""
    import tessera
    source = Path(tessera.__file__).resolve().parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")


@pytest.mark.parametrize("torch", [True, False], ids=["torch", "no_torch"])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, torch, environment):
    if torch:
        pytest.importorskip("torch")
    notebook = read(path)
    if not torch:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(WITHOUT_TORCH))
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    said = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert ("PyTorch is not installed" in said) != torch
    assert "runs on: cuda_sm90" in said
    rows = re.findall(r"^(tessera|plain NumPy) .* 4096 tokens .* ([\d.]+) MB$", said, re.MULTILINE)
    peaks = {name: float(peak) for name, peak in rows}
    assert peaks["tessera"] < 5 < 300 < peaks["plain NumPy"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_without_outputs(path):
    notebook = read(path)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (cell.outputs == [] and cell.execution_count is None), cell.id


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_links_exist(path):
    texts = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
    links = [link for text in texts for link in re.findall(r"\]\(([^)#]+)", text)]
    assert links and [link for link in links if not (path.parent / link).exists()] == []
