# SPDX-License-Identifier: Apache-2.0
"""The demo's three pictures. Colours are told apart by colour-blind readers (Okabe and Ito)."""

import datetime
import os
import textwrap
import warnings

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import tessera

from .._machine import cpu_model

BLUE, ORANGE, INK, FAINT = "#0072B2", "#D55E00", "#222222", "#8a8a8a"
MOST_LABELS = 60  # sentences beyond this are not named beside the heat map
MOST_WORDS = 24  # words of a sentence that are drawn

plt.rcParams.update(
    {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.facecolor": "white",
        "text.parse_math": False,
        "savefig.dpi": 120,
    }
)


def similarity(path, texts, similarities):
    """Heat map of all pairs."""
    n = len(texts)
    named = n <= MOST_LABELS
    side = min(max(0.36 * n, 2.6), 9.0)
    figure, axes = plt.subplots(figsize=(side + (4.6 if named else 1.4), side + 1.2))
    shown = np.clip(similarities, 0, 1)
    image = axes.imshow(shown, cmap="cividis", vmin=0, vmax=1)
    axes.set_title("Cosine similarity of sentences", loc="left", fontsize=12, pad=12)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if named:
        size = 9 if n <= 30 else 6
        short = [textwrap.shorten(text, 44, placeholder=" …") for text in texts]
        labels = [f"{text}  {i}" for i, text in enumerate(short, 1)]
        axes.set_yticks(range(n), labels, fontsize=size)
        axes.set_xticks(range(n), range(1, n + 1), fontsize=size)
    if n <= 24:
        for i, j in np.ndindex(n, n):
            if i != j:
                text = _minus(f"{similarities[i, j]:.2f}").replace("0.", ".", 1)
                colour = _readable_on(shown[i, j])
                axes.text(j, i, text, ha="center", va="center", fontsize=6.5, color=colour)
    bar = figure.colorbar(image, fraction=0.046, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=9)
    _save(figure, path)


def words(path, pair, sentences):
    """What each word brought to the similarity of two sentences, which name the panels. pair: of attribution.Shares."""
    drawn = [_strongest(s) for s in pair]
    digits = 2 if max(np.abs(s.share).max(initial=0) for s in pair) >= 0.1 else 3
    rows = max(len(d[0]) for d in drawn)
    figure, both = plt.subplots(1, 2, figsize=(10, 0.29 * rows + 1.8), sharex=True)
    for axes, shares, sentence, (names, values) in zip(both, pair, sentences, drawn):
        y = np.arange(len(names))
        axes.barh(y, values, height=0.66, color=np.where(values < 0, ORANGE, BLUE))
        for at, value in zip(y, values):
            axes.annotate(
                _minus(f"{value:+.{digits}f}"),
                (max(value, 0), at),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=FAINT,
            )
        axes.set_yticks(y, names, fontsize=10.5)
        axes.set_ylim(rows - 0.4, -0.6)
        axes.vlines(0, -0.45, len(names) - 0.55, color=FAINT, linewidth=0.8)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(length=0, labelbottom=False)
        axes.margins(x=0.14)
        left_out = len(shares.words) - len(names)
        note = f"; {left_out} weaker words not drawn" if left_out else ""
        rise = f"from {shares.hidden:.2f} with every word hidden to {shares.similarity:.2f}{note}"
        axes.set_title(_minus(rise), loc="left", fontsize=8.5, color=FAINT)
        short = textwrap.shorten(sentence, 52, placeholder=" …")
        axes.annotate(short, (0, 1), xycoords="axes fraction", xytext=(0, 22), textcoords="offset points", fontsize=10)
    figure.suptitle("What each word brings to the cosine similarity of these two sentences", x=0.012, ha="left")
    _save(figure, path, w_pad=3)


def scaling(path, fused, unfused, subtitle):
    """Time and memory against the number of tokens (two scaling.Curve)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.3))
    for axes, title, value, text in (
        (left, "Peak memory", lambda p: p.bytes, bytes_text),
        (right, "Time", lambda p: p.seconds, seconds_text),
    ):
        for curve, colour, marker in ((unfused, ORANGE, "s"), (fused, BLUE, "o")):
            _line(axes, curve, colour, marker, value)
        _label_ends(axes, (unfused, fused), (ORANGE, BLUE), value, text)
        tokens = [p.tokens for p in fused.measured]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(tokens, [f"{t // 1024}k" for t in tokens])
        axes.set_xlim(tokens[0] / 1.25, tokens[-1] * 1.6)  # room for the last labels
        ticks = [t for t in axes.get_yticks() if axes.get_ylim()[0] <= t <= axes.get_ylim()[1]]
        axes.set_yticks(ticks, [text(t) for t in ticks])
        axes.minorticks_off()
        axes.grid(axis="y", color="#e8e8e8", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("tokens")
        axes.set_title(title, loc="left", fontsize=12)
    figure.text(0.012, 0.015, subtitle, fontsize=8, color=FAINT)
    _save(figure, path, w_pad=3, rect=(0, 0.045, 1, 1))


def _line(axes, curve, colour, marker, value):
    x, y = [p.tokens for p in curve.measured], [value(p) for p in curve.measured]
    axes.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=2)
    if curve.extrapolated:
        beyond = [curve.measured[-1], *curve.extrapolated]
        x, y = [p.tokens for p in beyond], [value(p) for p in beyond]
        axes.plot(x, y, color=colour, linewidth=1.6, linestyle=(0, (3, 2)))


def _label_ends(axes, curves, colours, value, text):
    """Name and last value beside the end of each curve, apart from each other."""
    ends = [(*curve.measured, *curve.extrapolated)[-1:] for curve in curves]
    known = [value(end[0]) for end in ends if end]
    close = len(known) == 2 and max(known) < 4 * min(known)
    for curve, end, colour in zip(curves, ends, colours):
        if not end:
            continue
        aside = (12 if value(end[0]) == max(known) else -12) if close else 0
        dashed = "\n(dashed: extrapolated)" if curve.extrapolated else ""
        axes.annotate(
            f"{text(value(end[0]))}  {curve.name}{dashed}",
            (end[0].tokens, value(end[0])),
            xytext=(8, aside),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colour,
            annotation_clip=False,
        )


def _strongest(shares):
    """Words and shares in reading order, only the strongest MOST_WORDS of them."""
    keep = np.sort(np.argsort(-np.abs(shares.share))[:MOST_WORDS])
    words = [textwrap.shorten(shares.words[i], 22, placeholder="…") for i in keep]
    return words, shares.share[keep]


def _readable_on(similarity):
    return "black" if similarity > 0.5 else "white" if similarity > 0.2 else "#9fb3cc"


def _minus(number):
    return number.replace("-0.00", "0.00").replace("-", "−")


def bytes_text(n):
    for unit in ("B", "KB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            return f"{n:.1f}".removesuffix(".0") + f" {unit}" if n < 10 else f"{n:.0f} {unit}"
        n /= 1000


def seconds_text(s):
    return f"{s:.3g} s" if s >= 1 else f"{s * 1e3:.3g} ms"


def _origin() -> str:
    """Version, machine and date."""
    cores = len(os.sched_getaffinity(0))
    return f"tessera {tessera.__version__}, {cpu_model()}, {cores} cores, {datetime.date.today().isoformat()}"


def _save(figure, path, **tight):
    with warnings.catch_warnings():  # a sign that the font lacks becomes a box, silently
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.tight_layout(**tight)
        figure.text(0.012, -0.15 / figure.get_figheight(), _origin(), fontsize=8, color=FAINT, va="top")
        figure.savefig(path, bbox_inches="tight", pad_inches=0.15)
    plt.close(figure)
