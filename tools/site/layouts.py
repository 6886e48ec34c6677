# SPDX-License-Identifier: Apache-2.0
"""Pictures of where the keys of a case lie in memory, from the strides and tables that the library computes with."""

from __future__ import annotations

from pathlib import Path

import numpy as np

_PER_LINE = 16  # rows of k in a line of the picture


def plot(case_text: str, path: Path):
    """A PNG of k: a box is one row of head_dim elements in the order of memory, named by position and head,
    coloured by sequence; white: no key lies there."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    boxes = rows(case_text)
    lines = -(-len(boxes) // _PER_LINE)
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.5 * lines))
    for i, box in enumerate(boxes):
        x, y = i % _PER_LINE, i // _PER_LINE
        colour = "white" if box is None else f"C{box[0]}"
        axes.add_patch(plt.Rectangle((x, y), 0.94, 0.82, facecolor=colour, edgecolor="grey", alpha=0.75))
        if box is not None:
            axes.text(x + 0.47, y + 0.45, f"{box[1]}.{box[2]}", ha="center", va="center", fontsize=8)
    axes.set(xlim=(0, _PER_LINE), ylim=(lines, 0))
    axes.axis("off")
    sequences = sorted({box[0] for box in boxes if box is not None})
    axes.legend(handles=[plt.Rectangle((0, 0), 1, 1, facecolor=f"C{n}", alpha=0.75, label=f"sequence {n}")
                         for n in sequences],
                ncols=len(sequences), loc="upper left", bbox_to_anchor=(0, -0.02), fontsize=8, frameon=False)
    axes.set_title(f"{case_text}\nmemory of k, from left to right; a box is position.head", fontsize=9,
                   family="monospace", loc="left")
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def rows(case_text: str) -> list[tuple[int, int, int] | None]:
    """(sequence, position, head) of each row of k in the order of memory, None where no key lies."""
    from tessera.cli import conformance, mask
    with conformance.Case(case_text) as case:
        given = case.arguments()
        k = given["k"]
        layout = mask._layouts(given.get("layout", "bshd"))[1]
        steps = np.array(k.strides[:-1]) // (k.shape[-1] * k.itemsize)
        if any(np.array(k.strides[:-1]) % (k.shape[-1] * k.itemsize)):
            raise ValueError(f"layout of {case_text}: rows of k are not apart by whole rows")
        offsets = sum(np.ogrid[tuple(map(slice, k.shape[:-1]))][axis] * step for axis, step in enumerate(steps))
        memory: list[tuple[int, int, int] | None] = [None] * (int(offsets.max(initial=-1)) + 1)
        for index in np.ndindex(*k.shape[:-1]):
            memory[offsets[index]] = _owner(index, layout, given)
        return memory


def _owner(index, layout: str, given):
    """(sequence, position, head) of a row of k; None for a row that no sequence has."""
    from tessera.cli import mask
    token, head = (index[0:1] + index[2:], index[1]) if layout == "bhsd" else (index[:-1], index[-1])
    if (table := given.get("page_table")) is not None:
        size = given["k"].shape[1]
        for n, (pages, length) in enumerate(zip(table, given["seqlens_k"])):
            for i, page in enumerate(pages):
                if page == token[0] and i * size + token[1] < length:
                    return n, i * size + token[1], head
        return None
    if layout == "thd":
        for n, (start, length) in enumerate(mask._packed(given, "k")):
            if start <= token[0] < start + length:
                return n, token[0] - start, head
        return None
    sequence, position = token[::-1] if layout == "sbhd" else token
    lengths = given.get("seqlens_k")
    return (sequence, position, head) if lengths is None or position < lengths[sequence] else None
