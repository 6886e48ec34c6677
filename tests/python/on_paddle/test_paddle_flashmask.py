# SPDX-License-Identifier: Apache-2.0
"""tessera.paddle.flashmask_attention beside dense masks made by the words of Paddle's documentation."""

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

import tessera.paddle as tp  # noqa: E402


def dense(indices, causal, sq):
    """True = visible, [b, h, sq, sk], one row and column at a time."""
    b, h, sk, n = indices.shape
    mask = np.ones((b, h, sq, sk), bool)
    for x, y, j in np.ndindex(b, h, sk):
        start, *rest = indices[x, y, j]
        for i in range(sq):
            if causal:
                hidden = i < j or start <= i < (rest[0] if n == 2 else sq)
            elif n == 2:
                hidden = i >= start or i < rest[0]
            else:
                hidden = start <= i < rest[0] or rest[1] <= i < rest[2]
            mask[x, y, i, j] = not hidden
    return mask


def tensors(sq=10, sk=10, hq=4, hk=2, b=2):
    paddle.seed(4)
    found = [paddle.randn([b, sq, hq, 8]), paddle.randn([b, sk, hk, 8]), paddle.randn([b, sk, hk, 8])]
    for x in found:
        x.stop_gradient = False
    return found


def column(*values):
    return paddle.to_tensor(np.stack(values, -1)[None, None], dtype="int32").expand([2, 1, 10, -1])


# Ten rows and columns, as the documentation of Paddle draws them.
TEN = np.full(10, 10)
MASKS = {
    "causal documents": (column([4, 4, 4, 4, 7, 7, 7, 10, 10, 10]), True),
    "share question": (column([10, 10, 10, 10, 7, 7, 7, 10, 10, 10]), True),
    "global and window": (column([10, 10, 5, 6, 7, 8, 9, 10, 10, 10]), True),
    "eviction": (column([10, 5, 6, 10, 10, 10, 10, 10, 10, 10]), True),
    "sparse rows and columns": (column([10, 10, 2, 3, 4, 5, 6, 7, 10, 10],
                                       [10, 10, 5, 5, 5, 5, 8, 8, 10, 10]), True),
    "documents": (column([4, 4, 4, 4, 7, 7, 7, 10, 10, 10], [0, 0, 0, 0, 4, 4, 4, 7, 7, 7]), False),
    "window": (column([3, 4, 5, 6, 7, 8, 9, 10, 10, 10], [0, 0, 0, 1, 2, 3, 4, 5, 6, 7]), False),
    "prefix": (column(TEN, [0, 0, 0, 0, 0, 5, 6, 7, 8, 9]), False),
    "prefix documents": (column([3, 3, 3, 5, 5, 10, 10, 10, 10, 10],
                                [0, 0, 2, 3, 3, 5, 5, 7, 8, 9]), False),
    "rows hidden twice": (column([2] * 10, [4] * 10, [6] * 10, [8] * 10), False),
    "all hidden": (column([0] * 10), True),
}


def gradients_of(o, lse, inputs):
    seen = paddle.where(paddle.isfinite(lse), lse, paddle.zeros_like(lse))
    return paddle.grad((o * o).sum() + seen.sum(), inputs)


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_the_documentation(name):
    indices, causal = MASKS[name]
    inputs = tensors()
    o, lse = tp.flashmask_attention(*inputs, indices, causal=causal, return_softmax_lse=True)
    keep = paddle.to_tensor(dense(indices.numpy(), causal, 10))
    expected, expected_lse = tp.attention(*inputs, keep=keep, return_lse=True)
    assert float((o - expected).abs().max()) < 1e-5
    assert bool(paddle.isclose(lse, expected_lse).all())
    for x, y in zip(gradients_of(o, lse, inputs), gradients_of(expected, expected_lse, inputs)):
        assert float((x - y).abs().max()) < 1e-4


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("n, causal", [(1, True), (2, True), (2, False), (4, False)])
def test_random_masks(n, causal, heads):
    """Refused exactly where a row sees more than two runs; the same result with a dense mask."""
    random = np.random.default_rng(n + heads)
    refused = 0
    for _ in range(8):
        indices = random.integers(-2, 13, (2, heads, 10, n)).astype(np.int32)
        if random.random() < 0.5:  # fewer runs
            indices = np.repeat(indices[:, :, ::5], 5, 2)
        keep = dense(indices, causal, 10)
        steps = np.diff(np.pad(keep, ((0, 0),) * 3 + ((1, 0),)).astype(int), axis=-1)
        runs = (steps == 1).sum(-1).max()
        inputs = tensors()
        of_heads = np.repeat(keep, 4 // heads if heads > 1 else 1, 1)
        expected = tp.attention(*inputs, keep=paddle.to_tensor(of_heads))
        given = dict(startend_row_indices=paddle.to_tensor(indices), causal=causal)
        if runs > 2:
            refused += 1
            with pytest.raises(tp.Refused, match="allow_quadratic"):
                tp.flashmask_attention(*inputs, **given)
        o = tp.flashmask_attention(*inputs, **given, allow_quadratic=runs > 2)
        assert float((o - expected).abs().max()) < 1e-5
    assert refused < 8


def test_window_and_plain():
    inputs = tensors()
    for causal in (True, False):
        expected = tp.attention(*inputs, window=(3, 0 if causal else 3), align="top_left")
        o = tp.flashmask_attention(*inputs, window_size=3, causal=causal)
        assert bool((o == expected).all())
        o = tp.flashmask_attention(*inputs, causal=causal)
        assert bool((o == tp.attention(*inputs, causal=causal)).all())


def test_more_keys_than_rows():
    inputs = tensors(sq=6)
    indices = paddle.to_tensor(np.full((2, 1, 10, 2), (4, 1)), dtype="int32")
    o = tp.flashmask_attention(*inputs, indices)
    expected = tp.attention(*inputs, keep=paddle.to_tensor(dense(indices.numpy(), False, 6)))
    assert float((o - expected).abs().max()) < 1e-5


def test_dropout():
    inputs = tensors()
    state = paddle.to_tensor([7, 9], dtype="int64")
    o, used = tp.flashmask_attention(*inputs, dropout=0.5, fixed_seed_offset=state,
                                     return_seed_offset=True)
    assert used is state
    assert bool((o == tp.attention(*inputs, dropout_p=0.5, rng_state=state)).all())
    o, used = tp.flashmask_attention(*inputs, dropout=0.5, return_seed_offset=True)
    assert bool((o == tp.attention(*inputs, dropout_p=0.5, rng_state=used)).all())
    o = tp.flashmask_attention(*inputs, dropout=0.5, training=False)
    assert bool((o == tp.attention(*inputs)).all())


def test_block_mask():
    q, k, v = (paddle.randn([1, 200, 1, 8]) for _ in range(3))
    indices = paddle.full([1, 1, 200, 1], 200, "int32")
    blocks = paddle.to_tensor([[[[1, 0], [0, 1]]]], dtype="int32")
    with pytest.raises(tp.Refused, match="block_mask"):
        tp.flashmask_attention(q, k, v, indices, causal=True, block_mask=blocks)
    o = tp.flashmask_attention(q, k, v, indices, causal=True, block_mask=blocks, allow_quadratic=True)
    ids = (paddle.arange(200) // 128).astype("int32").unsqueeze(0)
    assert float((o - tp.attention(q, k, v, causal=True, segment_ids=ids)).abs().max()) < 1e-5


@pytest.mark.parametrize("given, message", [
    (dict(startend_row_indices=paddle.zeros([2, 1, 10, 1])), "startend_row_indices='float32'"),
    (dict(startend_row_indices=paddle.zeros([2, 1, 9, 2], "int32")), r"must be \[2, 1\|2\|4, 10, 2\|4\]"),
    (dict(startend_row_indices=paddle.zeros([2, 3, 10, 2], "int32")), r"startend_row_indices.shape"),
    (dict(startend_row_indices=paddle.zeros([2, 1, 10, 1], "int32")), r"startend_row_indices.shape"),
    (dict(startend_row_indices=paddle.zeros([2, 1, 10, 2], "int32"), window_size=3), "window_size=3"),
    (dict(window_size="3"), "window_size"),
    (dict(causal=1), "causal=1"),
    (dict(block_mask=paddle.ones([2, 1, 1, 1], "int32")), "block_mask"),
])
def test_bad_input(given, message):
    with pytest.raises(ValueError, match=message):
        tp.flashmask_attention(*tensors(), **given)


def test_undefined_diagonals_are_refused():
    with pytest.raises(tp.Refused, match="align="):
        tp.flashmask_attention(*tensors(sq=6), causal=True)
