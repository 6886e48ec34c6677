# SPDX-License-Identifier: Apache-2.0
"""python -m tessera mask: draws which keys each query of a case sees.

The library itself computes the picture. With q = 0 all visible keys have the same weight, and with one-hot v column j
of o is the weight of key j. Features that change scores but hide nothing (bias, ALiBi, dropout ...) are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import textwrap

import numpy as np

from .._call import _keywords
from . import case_lines, work

EPILOG = """\
examples:
  python -m tessera mask "fwd fp32 b=1 s=16 h=1 d=8 causal"
  python -m tessera mask "fwd fp32 b=2 sq=8 sk=24 h=1 d=8 window=6,0 align=bottom_right lens_k=24,13"
  python -m tessera mask "fwd fp32 b=1 s=64 h=1 d=8 causal segments=4" --plot mask.png
Rows are queries, columns are keys. In a large picture a character stands for several of each: # means that all of
its pairs are visible, + some, . none. docs/cases.md describes the language of cases."""

# The keywords that decide what is visible, and what they need beside them.
_SHAPING = ("layout", "causal", "window", "align", "page_table", *_keywords.LENGTHS, *work.DATA_MASKS)
_COLUMNS = 256        # of v in a run: keys that one run tells about
_MOST_PAIRS = 1 << 24  # of queries and keys, all heads
_WIDTH = 96           # characters of a line


@dataclasses.dataclass
class Picture:
    """What the queries of one sequence see: visible[i, j] of query i and key j, in one head."""
    sequence: int
    visible: np.ndarray

    @property
    def headline(self) -> str:
        queries, keys = self.visible.shape
        seen, pairs = int(self.visible.sum()), self.visible.size
        share = f"{100 * seen / pairs:.1f} %" if pairs else "none"
        return f"sequence {self.sequence}: {queries} queries, {keys} keys, {seen} of {pairs} pairs visible ({share})"


def add_parser(commands):
    parser = commands.add_parser("mask", help="draw which keys each query sees", description=__doc__,
                                 epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="+", help="a case line")
    parser.add_argument("--head", type=int, default=0, metavar="N", help="query head to draw, if masks differ by head")
    parser.add_argument("--plot", metavar="F.png", help="draw a picture instead of text (needs matplotlib)")
    parser.set_defaults(main=main)


def main(args) -> int:
    cases = case_lines.split(args.case)
    if len(cases) != 1:
        raise case_lines.UsageError(f"tessera.mask: {len(cases)} cases: draws one at a time")
    pictures = look(cases[0], args.head)
    if args.plot:
        plot(pictures, args.plot, " ".join(cases[0].split()))
        print(f"{args.plot}: {len(pictures)} sequences")
        return 0
    for picture in pictures:
        print(picture.headline)
        sys.stdout.writelines(line + "\n" for line in lines(picture.visible))
    return 0


def look(case_text: str, head: int = 0) -> list[Picture]:
    """What each sequence of the case sees in a head of the queries. ValueError for an illegal case."""
    import tessera
    from . import conformance
    with conformance.Case(case_text) as case:
        given = case.arguments()
        q, k, v = given["q"], given["k"], given["v"]
        keywords = {name: given[name] for name in _SHAPING if name in given}
        layout_q, layout_k = _layouts(keywords.get("layout", "bshd"))
        heads_q = q.shape[_heads(layout_q)]
        if not 0 <= head < heads_q:
            raise ValueError(f"tessera.mask: head={head}: the case has heads 0 .. {heads_q - 1}")
        place = _positions(v.shape, layout_k, keywords)
        keys = int(place.max(initial=-1)) + 1
        if (rows := q.size // q.shape[-1]) * keys > _MOST_PAIRS:
            raise ValueError(f"tessera.mask: {rows} rows of queries and {keys} keys: at most {_MOST_PAIRS} pairs; "
                             "draw a smaller case")
        zeros = np.zeros((*q.shape[:-1], 8), np.float32), np.zeros((*k.shape[:-1], 8), np.float32)
        seen = [tessera.attention(*zeros, _one_hot(place, first, layout_k, v.shape), **keywords) > 0
                for first in range(0, keys, _COLUMNS)]
        o = np.concatenate(seen, axis=-1)[..., :keys] if seen else np.zeros((*q.shape[:-1], 0), bool)
        return [Picture(n, visible[:, :count]) for n, (visible, count) in enumerate(
            _sequences(np.take(o, head, axis=_heads(layout_q)), layout_q, keywords, place))]


def _layouts(layout) -> tuple[str, str]:
    return (layout, layout) if isinstance(layout, str) else tuple(layout)


def _heads(layout: str) -> int:
    """The axis of the heads."""
    return -3 if layout == "bhsd" else -2


def _positions(shape, layout: str, keywords) -> np.ndarray:
    """The position in its sequence of each place of v in memory, -1 where it has none:
    [tokens] packed, [pages, page] paged, [keys] otherwise."""
    if (table := keywords.get("page_table")) is not None:
        table = table[-1] if isinstance(table, tuple) else table  # of v
        size = shape[-2] if layout == "bhsd" else shape[1]
        place = np.full((shape[0], size), -1)
        lengths = keywords.get("seqlens_k", np.full(len(table), table.shape[1] * size))
        for pages, length in zip(table, lengths):
            for i, page in enumerate(pages[:-(-int(length) // size)]):
                if 0 <= page < shape[0]:  # the entry of a hidden page may be anything
                    place[page] = i * size + np.arange(size)
        return place
    if layout == "thd":
        place = np.full(shape[0], -1)
        for start, length in _packed(keywords, "k"):
            place[start:start + length] = np.arange(length)
        return place
    return np.arange(shape[{"bshd": 1, "sbhd": 0, "bhsd": 2}[layout]])


def _packed(keywords, side: str) -> list[tuple[int, int]]:
    """(first token, tokens) of each sequence."""
    ends = keywords[f"cu_seqlens_{side}"]
    starts = keywords.get(f"cu_seqlens_{side}_padded", ends)
    return list(zip(map(int, starts[:-1]), map(int, np.diff(ends))))


def _one_hot(place: np.ndarray, first: int, layout: str, shape) -> np.ndarray:
    """v: row of the key at position first + c has a 1 in column c."""
    columns = (place[..., None] == first + np.arange(_COLUMNS)).astype(np.float32)
    columns = np.expand_dims(columns, -3 if layout == "bhsd" else -2)
    if layout in ("bshd", "bhsd") and place.ndim == 1:
        columns = columns[None]
    elif layout == "sbhd":
        columns = columns[:, None]
    return np.ascontiguousarray(np.broadcast_to(columns, (*shape[:-1], _COLUMNS)))


def _sequences(o: np.ndarray, layout: str, keywords, place):
    """(what its queries see, its keys) of each sequence; o is of one head."""
    if layout == "thd":
        rows = [o[start:start + length] for start, length in _packed(keywords, "q")]
    else:
        rows = list(np.moveaxis(o, 1, 0) if layout == "sbhd" else o)
        if (lengths := keywords.get("seqlens_q")) is not None:
            rows = [row[:n] for row, n in zip(rows, lengths)]
    if (ends := keywords.get("cu_seqlens_k")) is not None:
        counts = np.diff(ends)
    elif (counts := keywords.get("seqlens_k")) is None:
        counts = [o.shape[-1]] * len(rows)
    return list(zip(rows, map(int, counts)))


def lines(visible: np.ndarray) -> list[str]:
    """Text: a character for each pair, or for a square of pairs where a line would be too long."""
    queries, keys = visible.shape
    side = max(1, -(-max(queries, keys) // _WIDTH))
    text = []
    for i in range(0, queries, side):
        squares = (visible[i:i + side, j:j + side] for j in range(0, keys, side))
        marks = "".join("#" if square.all() else "+" if square.any() else "." for square in squares)
        text.append(f"{i:6} {marks}")
    return text


def plot(pictures: list[Picture], path: str, title: str):
    """A PNG with a panel for each of the first four sequences; a pair has one size in all of them."""
    from .plot import require_matplotlib
    require_matplotlib()
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    shown = [picture for picture in pictures if picture.visible.size][:4]
    if not shown:
        raise ValueError("tessera.mask: --plot: no sequence has a query and a key, so there is nothing to draw")
    queries = max(picture.visible.shape[0] for picture in shown)
    keys = sum(picture.visible.shape[1] for picture in shown)
    square = min(0.17, 8 / keys, 5 / queries)  # inches of a pair, but where a panel would be too thin to see
    wide, high = max(square, 0.3 / keys), max(square, 0.3 / queries)
    left, right, below, gap = 0.7, 0.15, 0.55, 0.75
    width = max(5, left + keys * wide + (len(shown) - 1) * gap + right)
    titles = textwrap.wrap(title, int(width / 0.08))
    above = 0.2 + 0.17 * len(titles) + (0.2 if len(pictures) > 1 else 0)
    height = above + queries * high + below
    figure = plt.figure(figsize=(width, height))
    for picture in shown:
        rows, columns = picture.visible.shape
        bottom = height - above - rows * high
        axes = figure.add_axes((left / width, bottom / height, columns * wide / width, rows * high / height))
        _panel(axes, picture.visible, wide, high)
        axes.set_title(f"sequence {picture.sequence}" if len(pictures) > 1 else "", fontsize=9, loc="left")
        left += columns * wide + gap
    figure.text(0.1 / width, 1 - 0.1 / height, "\n".join(titles), fontsize=9, family="monospace", va="top")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _panel(axes, visible: np.ndarray, wide: float, high: float):
    """wide, high: inches of a pair."""
    from matplotlib.ticker import MaxNLocator
    axes.imshow(visible, cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest", aspect="auto")
    queries, keys = visible.shape
    if min(wide, high) > 0.06:  # a line around each pair
        axes.set_xticks(np.arange(-0.5, keys), minor=True)
        axes.set_yticks(np.arange(-0.5, queries), minor=True)
        axes.grid(which="minor", color="white", linewidth=0.8)
        axes.tick_params(which="minor", length=0)
    for axis, inches in ((axes.xaxis, keys * wide), (axes.yaxis, queries * high)):
        axis.set_major_locator(MaxNLocator(max(1, min(8, int(inches / 0.28))), integer=True, min_n_ticks=1))
    axes.tick_params(labelsize=8)
    axes.set_xlabel("key", fontsize=9)
    axes.set_ylabel("query", fontsize=9)
