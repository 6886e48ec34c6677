# SPDX-License-Identifier: Apache-2.0
"""How far attention with products in fp8 is from exact, beside bf16: relative RMSE of o and of the gradients, by
distribution of the inputs and by length.

    python benchmarks/fp8_accuracy.py [--lengths 512 2048] [--json FILE] [--plot FILE]
    python benchmarks/fp8_accuracy.py --from FILE --plot FILE          # draws what was measured before

Causal, 2 heads of 128, bf16 inputs; exact is fp64 at these. Distributions are those of the case word data=: normal;
outliers (one element of a thousand is 11 times as large); channels (six channels of k have a mean of 12); sink (the
first key is 4 times as large). "a tensor" and "a head" are E4M3 q, k, v and do with one scale each.
"""

from __future__ import annotations

import argparse
import json
import platform
import time

import ml_dtypes
import numpy as np

import tessera

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
HEADS, DIM = 2, 128
DISTRIBUTIONS = ("normal", "outliers", "channels", "sink")
FORMS = {"bf16": {}, "E4M3, a scale a tensor": "tensor", "E4M3, a scale a head": "head",
         'precision="fp8", smooth="none"': dict(precision="fp8", smooth="none"),
         'precision="fp8", smooth="mean"': dict(precision="fp8", smooth="mean"),
         'precision="fp8"': dict(precision="fp8")}
RESULTS = ("o", "dq", "dk", "dv")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048], metavar="S")
    parser.add_argument("--from", dest="source", metavar="FILE", help="a file of --json instead of measuring")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args(argv)
    if args.source:
        with open(args.source, encoding="utf-8") as file:
            found = json.load(file)
    else:
        found = {"command": f"python benchmarks/fp8_accuracy.py --lengths {' '.join(map(str, args.lengths))}",
                 "date": time.strftime("%Y-%m-%d"), "machine": f"cpu, {platform.machine()}",
                 "version": tessera.__version__, "rows": [row for s in args.lengths for row in measure(s)]}
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    if args.plot:
        draw(found, args.plot)


def measure(s: int):
    for name in DISTRIBUTIONS:
        q, k, v, do = inputs(name, s)
        exact = both_passes(*(x.astype(np.float64) for x in (q, k, v, do)), dict(backend="reference"))
        for form, how in FORMS.items():
            got = scaled(q, k, v, do, how) if isinstance(how, str) else both_passes(q, k, v, do, how)
            row = {"data": name, "keys": s, "form": form}
            row |= {result: relative_rmse(a, b) for result, a, b in zip(RESULTS, got, exact)}
            print(f"{name:9} {s:5} {form:31} " + "  ".join(f"{r} {row[r]:.4f}" for r in RESULTS), flush=True)
            yield row


def inputs(name: str, s: int):
    """q, k, v, do bf16 [1, s, HEADS, DIM]."""
    draw = np.random.default_rng(1)
    q, k, v, do = (draw.standard_normal((1, s, HEADS, DIM), np.float32) for _ in range(4))
    if name == "outliers":
        for x in (q, k, v, do):
            x[draw.random(x.shape) < 0.001] *= 11
    if name == "channels":
        k[..., ::21] += 12
    if name == "sink":
        k[:, 0] *= 4
    return (x.astype(BF16) for x in (q, k, v, do))


def both_passes(q, k, v, do, how: dict) -> list:
    """[o, dq, dk, dv]."""
    o, lse = tessera.attention(q, k, v, causal=True, return_lse=True, **how)
    g = tessera.attention_backward(do, q, k, v, o, lse, causal=True, **how)
    return [o, g.dq, g.dk, g.dv]


def scaled(q, k, v, do, of: str) -> list:
    """The same of q, k, v and do as E4M3, with one scale a tensor or a head."""
    def rounded(x):
        x = x.astype(np.float32)
        largest = np.abs(x).max(axis=(0, 1, 3))
        scale = (largest if of == "head" else np.full_like(largest, largest.max())) / 448
        return (x / scale[:, None]).astype(E4M3), scale
    (q, q_scale), (k, k_scale), (v, v_scale), (do, do_scale) = map(rounded, (q, k, v, do))
    scales = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    o, lse = tessera.attention(q, k, v, causal=True, return_lse=True, **scales)
    g = tessera.attention_backward(do, q, k, v, o, lse, causal=True, do_scale=do_scale, **scales)
    return [o, g.dq, g.dk, g.dv]


def relative_rmse(got, exact) -> float:
    got = np.asarray(got, np.float64)
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def draw(found: dict, path: str):
    """Above: by distribution, at the longest length; below: by length, of channels."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import matplotlib.ticker
    rows = found["rows"]
    longest = max(row["keys"] for row in rows)
    figure, panels = plt.subplots(2, 2, figsize=(11, 7))
    for column, result in enumerate(("o", "dq")):
        bars, lines = panels[0][column], panels[1][column]
        for i, form in enumerate(FORMS):
            own = [row for row in rows if row["form"] == form]
            bars.bar([place + (i - 2.5) * 0.13 for place in range(len(DISTRIBUTIONS))],
                     [next(row[result] for row in own if row["data"] == name and row["keys"] == longest)
                      for name in DISTRIBUTIONS], width=0.13, label=form, color=f"C{i}")
            of_channels = [row for row in own if row["data"] == "channels"]
            lines.plot([row["keys"] for row in of_channels], [row[result] for row in of_channels], "o-", color=f"C{i}")
        bars.set_xticks(range(len(DISTRIBUTIONS)), DISTRIBUTIONS)
        bars.set_title(f"{result}, {longest} keys")
        lines.set_title(f"{result}, channels")
        lines.set_xscale("log", base=2)
        lines.xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        lines.set_xlabel("keys")
        for axes in (bars, lines):
            axes.set_yscale("log")
            axes.set_ylabel("relative RMSE")
            axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="lower center", ncols=3, frameon=False)
    figure.text(0.01, 0.005, f"{found['machine']}, {found['date']}, tessera {found['version']}: {found['command']}",
                fontsize=6, color="grey")
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
