# SPDX-License-Identifier: Apache-2.0
"""Pictures of bench results: speed beside peers, and % of the machine's peak."""

from __future__ import annotations

import importlib.util

from . import case_lines


def require_matplotlib():
    if importlib.util.find_spec("matplotlib") is None:
        raise case_lines.UsageError("--plot needs matplotlib; pip install tessera-attention[cli]")


def draw(results, against, path: str):
    """One row of bars for each case: TFLOP/s of tessera and of the peers, the peak as a tick."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    results = [result for result in results if "error" not in result]
    if not results:
        raise case_lines.UsageError("--plot: no case ran, so there is nothing to draw")
    names = ["tessera", *against]
    height = 0.8 / len(names)
    figure, axes = plt.subplots(figsize=(11, 1.2 + 0.45 * len(results) * max(1, len(names) / 2)))
    colours = plt.get_cmap("tab10")
    for i, name in enumerate(names):
        values = [result["tflops"] if name == "tessera" else
                  result["peers"][name].get("tflops", 0.0) for result in results]
        places = [row + i * height for row in range(len(results))]
        bars = axes.barh(places, values, height * 0.92, label=name, color=colours(i))
        if name == "tessera":
            labels = [f" {result['percent_of_peak']:.0f} % of peak" for result in results]
            axes.bar_label(bars, labels, fontsize=8)
    for row, result in enumerate(results):
        axes.plot([result["_peak_tflops"]] * 2, [row - height / 2, row + 0.8 - height / 2],
                  color="black", linewidth=1.5, label="peak of the machine" if row == 0 else None)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(results))],
                    [result["case"] for result in results], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s of useful work")
    axes.legend(loc="lower right", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
