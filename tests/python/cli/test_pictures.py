# SPDX-License-Identifier: Apache-2.0
"""What pictures of `bench`, `mask` and `demo` show: nothing hidden, nothing cut off, and where they come from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

plt = pytest.importorskip("matplotlib.pyplot")

from tessera.cli import bench, mask, plot  # noqa: E402

DATA = Path(__file__).resolve().parents[3] / "docs" / "data"


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn, still open."""
    figures = []

    def keep(figure):
        figure.canvas.draw()  # places everything by the figure's own dots, not by those of the file
        figures.append(figure)

    monkeypatch.setattr(plt, "close", keep)
    yield figures
    monkeypatch.undo()
    plt.close("all")


def texts(figure) -> list:
    """Every text that is drawn on the figure."""
    from matplotlib.text import Text
    return [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]


def outside(figure) -> list[str]:
    """Texts that the edge of the picture cuts off."""
    axes = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    ticks = {text for axis in axes for text in axis.get_ticklabels(which="both")}
    boxes = [(text.get_window_extent(), text) for text in texts(figure) if text not in ticks]
    return [text.get_text() for box, text in boxes if box.x0 < -1 or box.y0 < -1 or box.x1 > figure.bbox.x1 + 1 or
            box.y1 > figure.bbox.y1 + 1]


def result(case: str, **figures):
    peers = {"torch": {"ms": 4.0, "tflops": 0.05, "times": 2.0}, "numpy": {"refused": "too long"}}
    return {"case": case, "pass": case[:3], "ms": 2.0, "tflops": 0.1, "bytes_per_s": 1e9, "percent_of_peak": 97.0,
            "peers": peers, "machine": "two cores", "version": "9.8.7", "date": "2026-01-02",
            "command": "python -m tessera bench " + "'fwd fp32 b=1 s=512 h=4 d=64' " * 40, **figures}


RESULTS = [result("fwd fp32 b=1 s=512 h=4 d=64"),
           result("bwd fp32 b=1 s=1024 h=4 d=64", tflops=0.08, percent_of_peak=50),
           result("fwd fp32 b=4 sq=1 sk=16384 h=8 d=64", percent_of_bandwidth=80.0)]
SPREAD = [result(f"fwd fp32 b=1 s=512 h={heads} d=64 causal window=100,0") for heads in range(1, 40)]


@pytest.mark.parametrize("kind", plot._KINDS)
@pytest.mark.parametrize("results", [RESULTS, RESULTS[-1:], SPREAD], ids=["few", "one", "many"])
def test_a_plot_hides_nothing(drawn, tmp_path, kind, results):
    if kind == "bytes":
        results = [result for result in results if "percent_of_bandwidth" in result] or RESULTS[-1:]
    plot.draw(kind, results, ["torch", "numpy"], str(tmp_path / "plot.png"))
    axes, = drawn[0].axes
    legend = axes.get_legend().get_window_extent()
    assert not legend.overlaps(axes.patch.get_window_extent().padded(-1)), "the legend lies on the figures"
    assert not outside(drawn[0])
    assert not any(legend.overlaps(text.get_window_extent()) for text in (axes.xaxis.label, axes.yaxis.label))
    origin = drawn[0].texts[-1].get_text()
    assert "two cores, tessera 9.8.7, 2026-01-02" in origin and origin.count("\n") <= 4


def test_labels_of_bars_lie_beside_bars_and_peaks(drawn, tmp_path):
    plot.draw("bars", RESULTS, ["torch"], str(tmp_path / "plot.png"))
    axes, = drawn[0].axes
    peaks = axes.collections[0].get_segments()
    for row, label in enumerate(axes.texts):
        assert label.get_text() == f"{RESULTS[row]['percent_of_peak']:.0f} % of peak"
        x = axes.transData.transform((peaks[row][0][0], row))[0]
        box = label.get_window_extent()
        assert not box.x0 <= x <= box.x1, "the peak runs through its label"


@pytest.mark.parametrize("kind", ["bars", "roofline", "scaling"])
def test_the_unit_is_that_of_the_figures(drawn, tmp_path, kind):
    fast = [result("fwd bf16 b=1 s=512 h=4 d=64", tflops=600.0)]
    for results in (RESULTS, fast):
        plot.draw(kind, results, [], str(tmp_path / "plot.png"))
    labels = [" ".join((figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel())) for figure in drawn]
    assert "GFLOP/s" in labels[0] and "TFLOP/s" in labels[1]
    if kind == "bars":
        assert [patch.get_width() for patch in drawn[0].axes[0].patches] == pytest.approx([100, 80, 100])


@pytest.mark.parametrize("name", ["cpu", "hopper", "decode"])
@pytest.mark.parametrize("kind", plot._KINDS)
def test_figures_of_a_page_are_drawn_or_refused(drawn, tmp_path, name, kind):
    results, against = bench.read_results(str(DATA / f"{name}.json"))
    try:
        plot.draw(kind, results, against, str(tmp_path / "plot.png"))
    except plot.case_lines.UsageError as refused:
        assert (name, kind) in {("hopper", "roofline"), ("hopper", "bytes")} and "--plot-as" in str(refused)


def test_bench_says_what_it_ran(tmp_path, monkeypatch):
    import tessera
    from tessera.__main__ import main
    saved = tmp_path / "saved.json"
    assert main(["bench", "fwd fp32 b=1 s=16 h=1 d=16", "--quick", "--json", str(saved)]) == 0
    assert json.loads(saved.read_text())[0]["version"] == tessera.__version__


# ---- mask ----

@pytest.mark.parametrize("case", [
    "fwd fp32 b=3 sq=12 sk=24 h=1 d=8 causal align=bottom_right lens_q=12,6,3 lens_k=24,13,5",
    "fwd fp32 b=2 sq=8 sk=60 h=1 d=8 window=6,0 align=bottom_right lens_k=60,13",
    "fwd fp32 b=1 s=3 h=1 d=8 causal", "fwd fp32 b=1 sq=1 sk=4096 h=1 d=8", "fwd fp32 b=1 sq=600 sk=1 h=1 d=8",
    "fwd fp32 b=5 s=40 h=1 d=8 causal lens=40,30,20,10,0"])
def test_cells_of_a_mask_have_one_size(drawn, tmp_path, case):
    pictures = mask.look(case)
    mask.plot(pictures, str(tmp_path / "mask.png"), case)
    figure, = drawn
    sizes = []
    for axes, picture in zip(figure.axes, pictures):
        box = axes.get_window_extent()
        queries, keys = picture.visible.shape
        sizes.append((box.width / keys, box.height / queries))
        assert min(box.width, box.height) > 15, "too thin to see"
        drawn_ticks = [text.get_text() for text in axes.get_xticklabels() + axes.get_yticklabels()]
        assert all(text.lstrip("\N{MINUS SIGN}").isdigit() for text in drawn_ticks), drawn_ticks
    np.testing.assert_allclose(sizes, sizes[:1] * len(sizes), rtol=1e-6)
    assert not outside(figure)
    assert figure.texts[0].get_text().split() == case.split()


# ---- demo ----

def test_the_demo_says_where_its_pictures_come_from(drawn, tmp_path):
    for needed in ("tokenizers", "safetensors"):
        pytest.importorskip(needed)
    import tessera
    from tessera._machine import cpu_model
    from tessera.demo import plots
    from tessera.demo.attribution import Shares
    from tessera.demo.scaling import Curve, Point
    pair = [Shares(["A", "cat"], np.array([0.25, -0.125]), 0.5, 0.375) for _ in range(2)]
    points = [Point(1024, 0.1, 1 << 20), Point(2048, 0.4, 1 << 21)]
    curves = [Curve(name, points, []) for name in ("tessera", "unfused")]
    plots.words(tmp_path / "words.png", pair, ["1: A cat.", "7: The kitten."])
    plots.similarity(tmp_path / "similarity.png", ["A cat.", "The kitten."], np.array([[1, 0.6], [0.6, 1]]))
    plots.scaling(tmp_path / "scaling.png", *curves, "4 heads")
    for figure in drawn:
        origin = figure.texts[-1].get_text()
        assert f"tessera {tessera.__version__}" in origin and cpu_model() in origin and "20" in origin, origin
    shown = [text.get_text() for text in texts(drawn[0])]
    assert "1: A cat." in shown and "7: The kitten." in shown
