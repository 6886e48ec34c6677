# SPDX-License-Identifier: Apache-2.0
"""Pictures of bench results, fresh or from --json files."""

from __future__ import annotations

import importlib.util
import itertools
import math
import statistics
import textwrap

import numpy as np

from . import case_lines, sweep


def require_matplotlib():
    if importlib.util.find_spec("matplotlib") is None:
        raise case_lines.UsageError("--plot needs matplotlib; pip install tessera-attention[cli]")


def draw(kind: str, results, against, path: str):
    """kind: one of _KINDS. Peers that refused a case leave a gap."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    results = [result for result in results if "error" not in result]
    if not results:
        raise case_lines.UsageError("--plot: no case ran, so there is nothing to draw")
    figure = _KINDS[kind](plt, results, against)
    axes, = figure.axes
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_TITLES[kind], x=0.01, ha="left")
    width, height = figure.get_size_inches()
    origin = _origin(results, round(width * 20))
    figure.text(0.01, 0.05 / height, origin, fontsize=6, color="grey", va="bottom")
    figure.tight_layout(rect=(0, (0.1 + 0.1 * origin.count("\n") + 0.1) / height, 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _origin(results, width: int) -> str:
    """Machine, version, date and command of the results, in lines of `width`; of several runs, each that differs."""
    def of(key):
        return " | ".join(dict.fromkeys(result.get(key, f"{key} not recorded") for result in results))
    command = textwrap.shorten(of("command"), 3 * width, placeholder=" …")  # a list of many cases says little
    versions = {f"tessera {result['version']}, " for result in results if "version" in result}
    return "\n".join([f"{of('machine')}, {''.join(sorted(versions))}{of('date')}", *textwrap.wrap(command, width)])


def _legend(axes, entries: int):
    """Above the axes, where it hides nothing."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=min(entries, 5), fontsize=8, frameon=False)


def _speed(results) -> tuple[str, float]:
    """The unit of an axis of speeds, and how many of it a TFLOP/s is."""
    return ("TFLOP/s", 1) if max(result["tflops"] for result in results) >= 1 else ("GFLOP/s", 1e3)


def _plain_numbers(axis):
    """Powers of 10 on a logarithmic axis, and as many numbers between as there is room for."""
    from matplotlib.ticker import LogLocator, NullLocator
    low, high = axis.get_view_interval()
    between = (1, 1.2, 1.5, 2, 3, 4, 5, 6, 8) if high < 10 * low else (1, 2, 5) if high < 1e5 * low else (1,)
    axis.set_major_locator(LogLocator(subs=between, numticks=20))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def _of_peer(result, name: str, key: str):
    """A number of tessera or of a peer; nan where the peer refused."""
    return result[key] if name == "tessera" else result["peers"].get(name, {}).get(key, math.nan)


def _peak(result) -> float:
    """TFLOP/s; nan where a file does not tell."""
    share = result.get("percent_of_peak")
    return 100 * result["tflops"] / share if share else math.nan


def _bars(plt, results, against):
    """One row of bars for each case: speed of tessera and of the peers, the peak as a tick."""
    names = ["tessera", *against]
    unit, factor = _speed(results)
    peaks = [factor * _peak(result) for result in results]
    height = 0.8 / len(names)
    figure, axes = plt.subplots(figsize=(11, 1.6 + 0.45 * len(results) * max(1, len(names) / 2)))
    for i, name in enumerate(names):
        places = [row + i * height for row in range(len(results))]
        axes.barh(places, [factor * _of_peer(result, name, "tflops") for result in results], height * 0.92, label=name)
    if known := [row for row, peak in enumerate(peaks) if not math.isnan(peak)]:
        tops = np.array(known) - height / 2
        axes.vlines([peaks[row] for row in known], tops, tops + 0.8, color="black", linewidth=1.5,
                    label="peak of the machine")
    room = 0.16 * axes.get_xlim()[1]
    for row in known:  # beside the bar, or behind the tick, where it would run through the label
        end = factor * results[row]["tflops"]
        axes.annotate(f"{results[row]['percent_of_peak']:.0f} % of peak",
                      (end if end + room < peaks[row] else max(end, peaks[row]), row), xytext=(4, 0), fontsize=8,
                      textcoords="offset points", va="center")
    _name_rows(axes, results, 0.4 - height / 2)
    axes.margins(x=0.12 if known else 0.05, y=0.02)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{unit} of useful work")
    _legend(axes, len(names) + 1)
    return figure


def _name_rows(axes, results, offset: float):
    axes.set_yticks([row + offset for row in range(len(results))],
                    [result["case"] for result in results], fontsize=8)
    axes.invert_yaxis()


def _roofline(plt, results, against):
    """Speed over operations for each byte of inputs and outputs, under the roof of each dtype."""
    results = [result for result in results if result.get("bytes_per_s")]
    if not results:
        raise case_lines.UsageError("--plot-as roofline: no case has bytes_per_s; give a file that bench --json wrote")
    figure, axes = plt.subplots(figsize=(8, 5.5))
    unit, factor = _speed(results)
    dtypes = sorted({_dtype(result) for result in results})
    points = [(_dtype(result), 1e12 * result["tflops"] / result["bytes_per_s"], result)
              for result in results]
    reach = [x for _, x, _ in points]
    rates = [result["bytes_per_s"] * 100 / result["percent_of_bandwidth"] for result in results
             if result.get("percent_of_bandwidth")]
    for i, dtype in enumerate(dtypes):
        mine = [(x, result) for name, x, result in points if name == dtype]
        peaks = [factor * _peak(result) for _, result in mine if "percent_of_peak" in result]
        if not peaks:
            raise case_lines.UsageError(f"--plot-as roofline: no case of {dtype} has percent_of_peak; give a file that "
                                        "bench --json wrote")
        peak = statistics.median(peaks)
        ridge = peak / factor * 1e12 / statistics.median(rates) if rates else min(reach)
        if rates:
            left = min(min(reach) / 2, ridge)
            axes.plot([left, ridge], [peak * left / ridge, peak], color=f"C{i}", linewidth=1)
        axes.plot([min(ridge, max(reach)), 2 * max(reach)], [peak] * 2, color=f"C{i}", linewidth=1,
                  label=f"roof of {dtype}: {peak:.0f} {unit}")
        for direction, marker in (("fwd", "o"), ("bwd", "s")):
            chosen = [(x, factor * result["tflops"]) for x, result in mine if result["pass"] == direction]
            if chosen:
                axes.scatter(*zip(*chosen), color=f"C{i}", marker=marker, s=28,
                             label=f"{direction} {dtype}")
    memory = f"; memory is read at {statistics.median(rates) / 1e9:.0f} GB/s" if rates else ""
    axes.set(xscale="log", yscale="log", xlabel=f"useful operations for each byte of inputs and outputs{memory}",
             ylabel=f"{unit} of useful work")
    for axis in (axes.xaxis, axes.yaxis):
        _plain_numbers(axis)
    _legend(axes, 3)  # a line of the legend for each dtype
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
    figure, axes = plt.subplots(figsize=(9, 1.9 + 0.3 * len(results) * max(1, len(against) / 2)))
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
    axes.margins(x=0.1, y=0.01)
    _plain_numbers(axes.xaxis)
    _legend(axes, len(against))
    return figure


def _scaling(plt, results, against):
    """Speed over the length of the sequence: a colour for each kind of case and number of threads, a kind of line for
    tessera and each peer."""
    unit, factor = _speed(results)
    lines: dict[str, dict[str, list]] = {}
    for result in results:
        words = result["case"].split()
        sizes = dict(word.split("=", 1) for word in words if "=" in word)
        length = sizes.get("s") or sizes.get("sk")
        rest = " ".join(word for word in words if not word.startswith(("s=", "sk=")))
        rest += f" threads={result['threads']}" if result.get("threads") else ""
        for name in ("tessera", *against):
            point = int(length), factor * _of_peer(result, name, "tflops")
            lines.setdefault(rest, {}).setdefault(name, []).append(point)
    names = ["tessera", *against]
    figure, axes = plt.subplots(figsize=(11, max(5, 1.5 + 0.2 * (len(lines) + len(names)))))
    styles = dict(zip(names, itertools.cycle([("-", "o"), (":", "x"), ("--", "s"), ("-.", "^")])))
    for i, (rest, of_names) in enumerate(lines.items()):
        axes.plot([], [], color=f"C{i}", linewidth=4, label=rest)
        for name, points in of_names.items():
            axes.plot(*zip(*sorted(points)), color=f"C{i}", linestyle=styles[name][0], marker=styles[name][1],
                      markersize=4)
    for name, (line, marker) in styles.items():
        axes.plot([], [], color="black", linestyle=line, marker=marker, markersize=4, label=name)
    axes.set(xscale="log", xlabel="length of the sequence", ylabel=f"{unit} of useful work", ylim=0)
    ticks = sorted({x for of_names in lines.values() for points in of_names.values() for x, _ in points})
    axes.set_xticks(ticks, [str(x) for x in ticks], fontsize=8)
    axes.minorticks_off()
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7, frameon=False)
    return figure


def _bytes(plt, results, against):
    """Time over the bytes that a case reads, of tessera and the peers, above the time of a loop that reads as many."""
    from matplotlib.ticker import EngFormatter
    results = [result for result in results if result.get("percent_of_bandwidth")]
    if not results:
        raise case_lines.UsageError("--plot-as bytes: no case is bound by memory; take --suite decode or --grid goals")
    figure, axes = plt.subplots(figsize=(8, 5.5))
    read = [result["bytes_per_s"] * result["ms"] / 1e3 for result in results]
    rate = statistics.median(result["bytes_per_s"] * 100 / result["percent_of_bandwidth"] for result in results)
    for name, marker in zip(("tessera", *against), itertools.cycle("oxs+^v")):
        axes.scatter(read, [_of_peer(result, name, "ms") / 1e3 for result in results], marker=marker, s=22, label=name)
    ends = [min(read), max(read)]
    axes.plot(ends, [x / rate for x in ends], color="black", linewidth=1,
              label=f"a loop that reads: {rate / 1e9:.0f} GB/s")
    ruled = sorted((x, result["byte_rule_ms"] / 1e3) for x, result in zip(read, results) if result.get("byte_rule_ms"))
    if ruled:
        axes.plot(*zip(*ruled), color="grey", linewidth=0.8, linestyle="--", label="the byte rule")
    axes.set(xscale="log", yscale="log", xlabel="bytes of q, k, v and o", ylabel="time of a call")
    for axis, sign in ((axes.xaxis, "B"), (axes.yaxis, "s")):
        _plain_numbers(axis)
        axis.set_major_formatter(EngFormatter(sign))
    _legend(axes, 5)
    return figure


def _sweep(plt, results, against):
    """Time of the best peer over tessera's, over the operations of a case; the worst have their rank, and lines below
    that say what they are."""
    results = [sweep.compared(result) for result in results if sweep.best_peer(result)]
    if not results:
        raise case_lines.UsageError("--plot-as sweep: no peer ran a case, so nothing can be compared; --against")
    figure, axes = plt.subplots(figsize=(11, 7.5))
    for direction, color in (("fwd", "C0"), ("bwd", "C1")):
        points = [(_flop(result), result["ratio"]) for result in results if result["pass"] == direction]
        if points:
            axes.scatter(*zip(*points), s=14, color=color, alpha=0.7, label=direction)
    axes.axhline(1, color="black", linewidth=1, label="as fast as the best peer")
    worst = sweep.worst(results)
    for rank, result in enumerate(worst, 1):
        side = 1 if rank % 2 else -1  # neighbours in rank are often neighbours in the picture
        axes.annotate(str(rank), (_flop(result), result["ratio"]), xytext=(4 * side, -3), textcoords="offset points",
                      fontsize=8, fontweight="bold", ha="left" if side > 0 else "right")
    axes.set(xscale="log", yscale="log", ylabel="time of the best peer / time of tessera",
             xlabel="operations of the matrix products (FLOP)")
    _plain_numbers(axes.yaxis)
    lines = [f"{rank:2}  {result['ratio']:.3f} {result['best_peer']:<14}{result.get('model', ''):<28}{result['case']}"
             for rank, result in enumerate(worst, 1)]
    axes.text(0, -0.14, "\n".join(line if len(line) <= 150 else f"{line[:149]}…" for line in lines),
              transform=axes.transAxes, fontsize=6.5, family="monospace", va="top")
    _legend(axes, 3)
    return figure


def _flop(result) -> float:
    """Operations of the matrix products of a case; files of earlier versions have the speed alone."""
    return result.get("flop") or result["tflops"] * result["ms"] * 1e9


_TITLES = {"bars": "Attention: speed of each case", "roofline": "Attention: speed, and what bounds it",
           "ratio": "Attention: how many times as long others take", "scaling": "Attention: speed over length",
           "bytes": "Decode: time, and the bytes that it reads",
           "sweep": "Attention: random shapes of real models, and how many times as long the best peer takes"}
_KINDS = {"bars": _bars, "roofline": _roofline, "ratio": _ratio, "scaling": _scaling, "bytes": _bytes,
          "sweep": _sweep}
