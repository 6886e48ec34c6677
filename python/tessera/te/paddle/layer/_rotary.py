# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (Su et al., arXiv:2104.09864), in halves of the head dim."""

from __future__ import annotations

import paddle


class RotaryPositionEmbedding(paddle.nn.Layer):
    """Cosines and sines of the angles of positions below max_position_embeddings, for `dim` of a
    head's features."""

    def __init__(self, dim: int, max_position_embeddings: int):
        super().__init__()
        self.dim, self.max_position_embeddings = dim, max_position_embeddings
        self.inv_freq = 10000.0 ** (-paddle.arange(0, dim, 2, dtype="float32") / dim)
        angles = paddle.outer(paddle.arange(max_position_embeddings, dtype="float32"), self.inv_freq)
        angles = paddle.concat([angles, angles], -1)[None, :, None, :]
        self.max_seq_len_cached = max_position_embeddings
        self.cos_cached, self.sin_cached = angles.cos(), angles.sin()

    def forward(self, max_seq_len: int):
        """(cos, sin), [1, max_seq_len, 1, dim]."""
        return self.cos_cached[:, :max_seq_len], self.sin_cached[:, :max_seq_len]


def rotate_half(x: paddle.Tensor) -> paddle.Tensor:
    """(x1, x2) -> (-x2, x1), of the halves of the last axis."""
    first, second = x.chunk(2, -1)
    return paddle.concat([-second, first], -1)


def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None):
    """(q, k), rotated. q and k are [b, s, h, d]; cos and sin [1, positions, 1, d]; position_ids, int
    [b, s], says which positions they are, from 0 on unless given."""
    if position_ids is None:
        cos, sin = (x[:, :q.shape[1]] for x in (cos, sin))
    else:
        cos, sin = (x[0, :, 0][position_ids].unsqueeze(2) for x in (cos, sin))
    return tuple((x * cos + rotate_half(x) * sin).astype(x.dtype) for x in (q, k))
