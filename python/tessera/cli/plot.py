# SPDX-License-Identifier: Apache-2.0
"""Pictures of bench results, fresh or from --json files."""

from __future__ import annotations

import importlib.util
import itertools
import math
import statistics

from . import case_lines


def require_matplotlib():
    if importlib.util.find_spec("matplotlib") is None:
        raise case_lines.UsageError("--plot needs matplotlib; pip install tessera-attention[cli]")


def draw(kind: str, results, against, path: str):
    """kind: bars, roofline, ratio or scaling. Peers that refused a case leave a gap."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    results = [result for result in results if "error" not in result]
    if not results:
        raise case_lines.UsageError("--plot: no case ran, so there is nothing to draw")
    figure = _KINDS[kind](plt, results, against)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_TITLES[kind])
    figure.text(0.01, 0.005, _origin(results), fontsize=6, color="grey", va="bottom")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _origin(results) -> str:
    """Machine, date and command of the results; of files of several runs, each that differs."""
    def of(key):
        return " | ".join(dict.fromkeys(result.get(key, f"{key} not recorded") for result in results))
    return f"{of('machine')}, {of('date')}\n{of('command')}"


def _of_peer(result, name: str, key: str):
    """A number of tessera or of a peer; nan where the peer refused."""
    return result[key] if name == "tessera" else result["peers"].get(name, {}).get(key, math.nan)


def _peak(result) -> float:
    return 100 * result["tflops"] / result["percent_of_peak"]


def _bars(plt, results, against):
    """One row of bars for each case: TFLOP/s of tessera and of the peers, the peak as a tick."""
    names = ["tessera", *against]
    height = 0.8 / len(names)
    figure, axes = plt.subplots(figsize=(11, 1.2 + 0.45 * len(results) * max(1, len(names) / 2)))
    for i, name in enumerate(names):
        places = [row + i * height for row in range(len(results))]
        bars = axes.barh(places, [_of_peer(result, name, "tflops") for result in results],
                         height * 0.92, label=name)
        if name == "tessera":
            labels = [f" {result['percent_of_peak']:.0f} % of peak" for result in results]
            axes.bar_label(bars, labels, fontsize=8)
    for row, result in enumerate(results):
        axes.plot([_peak(result)] * 2, [row - height / 2, row + 0.8 - height / 2], color="black",
                  linewidth=1.5, label="peak of the machine" if row == 0 else None)
    _name_rows(axes, results, 0.4 - height / 2)
    axes.set_xlabel("TFLOP/s of useful work")
    axes.legend(loc="lower right", fontsize=8)
    return figure


def _name_rows(axes, results, offset: float):
    axes.set_yticks([row + offset for row in range(len(results))],
                    [result["case"] for result in results], fontsize=8)
    axes.invert_yaxis()


def _roofline(plt, results, against):
    """TFLOP/s over operations for each byte of inputs and outputs, under the roof of each dtype."""
    figure, axes = plt.subplots(figsize=(8, 5.5))
    dtypes = sorted({_dtype(result) for result in results})
    points = [(_dtype(result), 1e12 * result["tflops"] / result["bytes_per_s"], result)
              for result in results]
    reach = [x for _, x, _ in points]
    rates = [result["bytes_per_s"] * 100 / result["percent_of_bandwidth"] for result in results
             if result.get("percent_of_bandwidth")]
    for i, dtype in enumerate(dtypes):
        mine = [(x, result) for name, x, result in points if name == dtype]
        peaks = [_peak(result) for _, result in mine if "percent_of_peak" in result]
        if not peaks:
            raise case_lines.UsageError(f"--plot-as roofline: no case of {dtype} has percent_of_peak; give a file that "
                                        "bench --json wrote")
        peak = statistics.median(peaks)
        ridge = peak * 1e12 / statistics.median(rates) if rates else min(reach)
        if rates:
            left = min(min(reach) / 2, ridge)
            axes.plot([left, ridge], [peak * left / ridge, peak], color=f"C{i}", linewidth=1)
        axes.plot([min(ridge, max(reach)), 2 * max(reach)], [peak] * 2, color=f"C{i}", linewidth=1,
                  label=f"roof of {dtype}: {peak * 1e3:.0f} GFLOP/s")
        for direction, marker in (("fwd", "o"), ("bwd", "s")):
            chosen = [(x, result["tflops"]) for x, result in mine if result["pass"] == direction]
            if chosen:
                axes.scatter(*zip(*chosen), color=f"C{i}", marker=marker, s=28,
                             label=f"{direction} {dtype}")
    axes.set(xscale="log", yscale="log", xlabel="useful operations for each byte of inputs and outputs",
             ylabel="TFLOP/s of useful work")
    if rates:
        axes.set_title(f"memory read at {statistics.median(rates) / 1e9:.0f} GB/s", fontsize=9)
    axes.legend(fontsize=7)
    return figure


def _dtype(result) -> str:
    return result["case"].split()[1]


def _ratio(plt, results, against):
    """Time of each peer over tessera's, as bars from 1: rightwards where tessera is faster. Cases
    that no peer runs are left out."""
    if not against:
        raise case_lines.UsageError("--plot-as ratio: there is no peer to compare with; --against")
    results = [result for result in results
               if any("times" in result["peers"].get(name, {}) for name in against)]
    height = 0.8 / len(against)
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.3 * len(results) * max(1, len(against) / 2)))
    for i, name in enumerate(against):
        ratios = [_of_peer(result, name, "times") if name in result["peers"] else math.nan
                  for result in results]
        bars = axes.barh([row + i * height for row in range(len(results))],
                         [ratio - 1 for ratio in ratios], height * 0.92, left=1, label=name)
        axes.bar_label(bars, ["" if math.isnan(ratio) else f" {ratio:.2f}" for ratio in ratios],
                       fontsize=7)
    axes.axvline(1, color="black", linewidth=1)
    _name_rows(axes, results, 0.4 - height / 2)
    axes.set(xscale="log", xlabel="time of the peer / time of tessera")
    axes.margins(y=0.01)
    for of_axis in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        of_axis("{x:g}")
    axes.legend(loc="lower right", fontsize=8)
    return figure


def _scaling(plt, results, against):
    """Speed over the length of the sequence, a line for each kind of case and number of threads."""
    figure, axes = plt.subplots(figsize=(8, 5))
    lines: dict[str, list] = {}
    for result in results:
        words = result["case"].split()
        sizes = dict(word.split("=", 1) for word in words if "=" in word)
        length = sizes.get("s") or sizes.get("sk")
        rest = " ".join(word for word in words if not word.startswith(("s=", "sk=")))
        threads = f" threads={result['threads']}" if result.get("threads") else ""
        for name in ("tessera", *against):
            label = f"{name}: {rest}{threads}"
            lines.setdefault(label, []).append((int(length), _of_peer(result, name, "tflops")))
    for label, points in lines.items():
        points.sort()
        axes.plot(*zip(*points), label=label, marker="o", markersize=3,
                  linestyle="-" if label.startswith("tessera") else ":")
    axes.set(xscale="log", xlabel="length of the sequence", ylabel="TFLOP/s of useful work", ylim=0)
    ticks = sorted({x for points in lines.values() for x, _ in points})
    axes.set_xticks(ticks, [str(x) for x in ticks], fontsize=8)
    axes.minorticks_off()
    axes.legend(fontsize=7)
    return figure


def _bytes(plt, results, against):
    """Time over the bytes that a case reads, of tessera and the peers, above the time of a loop that reads as many."""
    results = [result for result in results if result.get("percent_of_bandwidth")]
    if not results:
        raise case_lines.UsageError("--plot-as bytes: no case is bound by memory; take --suite decode or --grid goals")
    figure, axes = plt.subplots(figsize=(8, 5.5))
    read = [result["bytes_per_s"] * result["ms"] / 1e3 for result in results]
    rate = statistics.median(result["bytes_per_s"] * 100 / result["percent_of_bandwidth"] for result in results)
    for name, marker in zip(("tessera", *against), itertools.cycle("oxs+^v")):
        axes.scatter(read, [1e3 * _of_peer(result, name, "ms") for result in results], marker=marker, s=22, label=name)
    ends = [min(read), max(read)]
    axes.plot(ends, [1e6 * x / rate for x in ends], color="black", linewidth=1,
              label=f"a loop that reads: {rate / 1e9:.0f} GB/s")
    ruled = sorted((x, 1e3 * result["byte_rule_ms"]) for x, result in zip(read, results) if result.get("byte_rule_ms"))
    if ruled:
        axes.plot(*zip(*ruled), color="grey", linewidth=0.8, linestyle="--", label="the byte rule")
    axes.set(xscale="log", yscale="log", xlabel="bytes of q, k, v and o", ylabel="us")
    axes.legend(fontsize=8)
    return figure


_TITLES = {"bars": "Attention: speed of each case", "roofline": "Attention: speed, and what bounds it",
           "ratio": "Attention: how many times as long others take", "scaling": "Attention: speed over length",
           "bytes": "Decode: time, and the bytes that it reads"}
_KINDS = {"bars": _bars, "roofline": _roofline, "ratio": _ratio, "scaling": _scaling, "bytes": _bytes}
