# SPDX-License-Identifier: Apache-2.0
"""paddle.nn.functional.flashmask_attention, by key ranges.

FlashMask says for each key column which rows do not see it: up to two intervals. What a row sees is
then a number of runs of columns, and tessera's key_ranges hold two. They are found in time and
memory of O(rows + columns), without a mask: a run begins for the rows that see column j and not
j - 1, which is a sum of signed intervals of rows; running sums over the rows of how many runs have
begun, of the columns j where they did, and of j², give both columns, as the two roots of a
quadratic.
"""

from __future__ import annotations

import contextlib
import logging

import paddle

from .. import _lib
from .._call import _args
from . import _functions, _tensors

_log = logging.getLogger("tessera.paddle")
_BLOCK = 128  # rows and columns of an element of block_mask


def flashmask_attention(
        query: paddle.Tensor, key: paddle.Tensor, value: paddle.Tensor,
        startend_row_indices: paddle.Tensor | None = None, *, dropout: float = 0.0,
        causal: bool = False, window_size: int | tuple[int, int] | None = None,
        return_softmax_lse: bool = False, return_seed_offset: bool = False,
        fixed_seed_offset: paddle.Tensor | None = None, rng_name: str = "", training: bool = True,
        name: str | None = None, softmax_scale: float | None = None,
        block_mask: paddle.Tensor | None = None, allow_quadratic: bool = False):
    """paddle.nn.functional.flashmask_attention, on the CPU too, in fp32 too, with any head dim.

    query [b, sq, hq, d], key and value [b, sk, hk, d] -> o [b, sq, hq, d]. startend_row_indices,
    int32 [b, 1|hk|hq, sk, 1|2|4], says which rows i do not see column j, as Paddle defines it: with
    causal, rows from [0] on, or from [0] to [1]; without, rows from [0] on and before [1], or from
    [0] to [1] and from [2] to [3]. window_size, in its place, is (left, right). block_mask, int32
    [b, heads of the indices, sq/128, sk/128], has 0 where a block of 128 x 128 is hidden.

    Returns o, or a list [o, softmax_lse [b, hq, sq] of float32, seed_offset int64 [2]] with what was
    asked for. Dropout's mask is tessera.paddle.dropout_mask's, of fixed_seed_offset where that is
    given. `name` has no effect. A row that sees nothing is 0.

    Raises Refused for a mask that leaves a row more than two runs of columns, and for block_mask,
    unless allow_quadratic permits a boolean mask [b, heads, sq, sk], whose bytes are logged.
    """
    a = _args.Arguments(_tensors, "flashmask_attention")
    for own, x in (("query", query), ("key", key), ("value", value)):
        info = _tensors.info(x)
        if info is None or len(info.shape) != 4:
            raise a.error(own, x if info is None else list(info.shape),
                          "must be a Paddle tensor [batch, seqlen, heads, head_dim]")
    state = fixed_seed_offset
    dropout = dropout if a.boolean("training", training) else 0.0
    if dropout and state is None:
        with _generator(rng_name):
            state = _tensors.random_words(query)
    mask = _mask(a, query, key, startend_row_indices, a.boolean("causal", causal), window_size,
                 block_mask, a.boolean("allow_quadratic", allow_quadratic))
    o, lse = _functions.attention(query, key, value, **mask, softmax_scale=softmax_scale,
                                  dropout_p=dropout, rng_state=state, return_lse=True)
    outputs = [o] + [lse] * bool(return_softmax_lse) + [state] * bool(return_seed_offset)
    return o if len(outputs) == 1 else outputs


def _mask(a, query, key, rows, causal: bool, window, blocks, allow_quadratic: bool) -> dict:
    """Keywords of attention."""
    sq, sk = query.shape[1], key.shape[1]
    if (causal or window is not None) and sq != sk:
        raise _lib.Refused(f"tessera.{a.operation}: query.shape[1]={sq}, key.shape[1]={sk}: which "
                           "diagonal causal and window_size mean here is not defined; use "
                           "tessera.paddle.attention, with align=")
    if window is not None:
        if rows is not None:
            raise a.error("window_size", window, "illegal beside startend_row_indices; say both in "
                          "the indices")
        window = (window, window) if type(window) is int else window
        left, right = a.pair_of_integers("window_size", window, "(left, right)")
        return dict(window=(left, 0 if causal else right), align="top_left")
    if rows is None:
        if blocks is not None:
            raise a.error("block_mask", blocks, "needs startend_row_indices")
        return dict(causal=causal, align="top_left")
    _check(a, "startend_row_indices", rows, (query.shape[0], sk), (0, 2),
           (1, 2) if causal else (2, 4), {1, key.shape[2], query.shape[2]})
    if blocks is not None:
        _check(a, "block_mask", blocks, (query.shape[0], -(-sq // _BLOCK), -(-sk // _BLOCK)),
               (0, 2, 3), None, {rows.shape[1]})
    rows, blocks = (_for_heads(x, query.shape[2]) for x in (rows, blocks))
    hidden = _hidden(rows.astype("int64"), causal, sq)
    count = 3
    if blocks is None:
        ranges, count = _ranges(hidden, sq)
    if count <= 2:
        return dict(key_ranges=ranges)
    size = rows.shape[0] * rows.shape[1] * sq * sk
    if not allow_quadratic:
        why = f"a row sees {count} runs of columns, and key ranges hold 2" if blocks is None else \
            "block_mask is not made into key ranges"
        raise _lib.Refused(f"tessera.{a.operation}: startend_row_indices: {why}; give "
                           f"allow_quadratic=True for a boolean mask of {size} bytes")
    _log.warning("flashmask_attention: a boolean mask of %d bytes", size)
    drop = _dense(hidden, sq)
    if blocks is not None:
        whole = blocks.repeat_interleave(_BLOCK, 2).repeat_interleave(_BLOCK, 3)
        drop = paddle.logical_or(drop, whole[:, :, :sq, :sk] == 0)
    return dict(drop=drop)


def _check(a, name, x, extents, axes, last, heads):
    info = _tensors.info(x)
    if info is None or info.dtype != "int32":
        raise a.error(name, x if info is None else info.dtype, "must be an int32 Paddle tensor")
    shape = info.shape
    if len(shape) != 4 or tuple(shape[i] for i in axes) != extents or shape[1] not in heads or \
            last and shape[3] not in last:
        known = list(map(str, ("b", "heads", "sk", "n")))
        for axis, extent in zip(axes, extents):
            known[axis] = str(extent)
        known[1] = "|".join(map(str, sorted(heads)))
        known[3] = "|".join(map(str, last)) if last else known[3]
        raise a.error(f"{name}.shape", list(shape), f"must be [{', '.join(known)}]")


def _hidden(rows, causal: bool, sq: int):
    """Two intervals of rows that do not see each column: (from, to, from, to), int64 [b, h, sk]."""
    parts, zero = rows.unbind(-1), paddle.zeros_like(rows[..., 0])
    end = zero + sq
    if causal:
        parts = [parts[0], parts[1] if len(parts) == 2 else end, zero,
                 zero + paddle.arange(rows.shape[2], dtype="int64")]
    elif len(parts) == 2:
        parts = [parts[0], end, zero, parts[1]]
    low, high, low2, high2 = (paddle.clip(x, 0, sq) for x in parts)
    return low, paddle.maximum(low, high), low2, paddle.maximum(low2, high2)


def _ranges(hidden, sq: int):
    """(key ranges int32 [b, h, sq, 4], the most runs of columns that a row sees); the ranges are right
    where that is at most 2."""
    everything = [paddle.zeros_like(hidden[0][..., :1]), paddle.full_like(hidden[0][..., :1], sq)] * 2
    before = [paddle.concat(pair, -1) for pair in zip(everything, hidden)]  # of column j - 1
    after = [paddle.concat(pair[::-1], -1) for pair in zip(everything, hidden)]  # of column j
    own = [_intervals(*side) for side in (before, after)]
    both = [(sign * sign2, paddle.maximum(low, low2), paddle.minimum(high, high2))
            for sign, low, high in own[0] for sign2, low2, high2 in own[1]]
    minus = [(-sign, low, high) for sign, low, high in both]
    begins = _columns(own[0] + minus, sq)  # hidden at j - 1, and not at j
    ends = _columns(own[1] + minus, sq)
    ranges = [begins[1], ends[1], begins[2], ends[2]]
    return paddle.stack(ranges, -1).astype("int32"), int(begins[0].max()) if begins[0].size else 0


def _intervals(low, high, low2, high2):
    """The union of two intervals as a sum: [(sign, from, to)]."""
    return [(1, low, high), (1, low2, high2),
            (-1, paddle.maximum(low, low2), paddle.minimum(high, high2))]


def _columns(intervals, sq: int):
    """(how many columns each row is in, the first of two, the second), int64 [b, h, sq], of intervals
    of rows for each column. Of one column, the second interval that it bounds is empty: both are it."""
    b, h, n = intervals[0][1].shape
    column = paddle.arange(n, dtype="int64").expand([b, h, n])
    sums = []
    for weight in (paddle.ones_like(column), column, column * column):
        steps = paddle.zeros([b, h, sq + 1], "int64")
        for sign, low, high in intervals:
            weight_here = paddle.where(low < high, sign * weight, paddle.zeros_like(weight))
            steps = paddle.put_along_axis(steps, low, weight_here, -1, "add", True, False)
            steps = paddle.put_along_axis(steps, high, -weight_here, -1, "add", True, False)
        sums.append(paddle.cumsum(steps, -1)[..., :-1])
    count, total, squares = sums
    # Two columns x <= y with x + y = total and x² + y² = squares: (y - x)² = 2 squares - total².
    spread = paddle.sqrt(paddle.clip(2 * squares - total * total, 0).astype("float64"))
    spread = paddle.where(count == 2, paddle.round(spread).astype("int64"), paddle.zeros_like(total))
    total = paddle.where(count == 1, 2 * total, total)
    return count, (total - spread) // 2, (total + spread) // 2


def _dense(hidden, sq: int):
    row = paddle.arange(sq, dtype="int64").unsqueeze(-1)
    low, high, low2, high2 = (x.unsqueeze(2) for x in hidden)
    inside = [paddle.logical_and(row >= x, row < y) for x, y in ((low, high), (low2, high2))]
    return paddle.logical_or(*inside)


def _for_heads(x, hq: int):
    """With one head or hq, as attention takes them, not hk."""
    return x if x is None or x.shape[1] in (1, hq) else x.repeat_interleave(hq // x.shape[1], 1)


def _generator(name: str):
    """Where `name` names a state of fleet's tracker, that is drawn from."""
    if not name:
        return contextlib.nullcontext()
    from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker
    return get_rng_state_tracker().rng_state(name)
