# SPDX-License-Identifier: Apache-2.0
"""What TE's attention and its callers share."""

from __future__ import annotations

import paddle

from ._refused import missing

__all__ = ["attention_mask_func", "divide"]
__getattr__ = missing(__name__)


def attention_mask_func(attention_scores: paddle.Tensor, attention_mask: paddle.Tensor
                        ) -> paddle.Tensor:
    """Scores, with -10000 where the mask is True: a row that is all hidden is an average."""
    hidden = paddle.full([], -10000.0, attention_scores.dtype)
    return paddle.where(attention_mask, hidden, attention_scores)


def divide(numerator: int, denominator: int) -> int:
    """The quotient, which must be whole."""
    assert numerator % denominator == 0, f"{numerator} is not divisible by {denominator}"
    return numerator // denominator
