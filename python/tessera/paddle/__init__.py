# SPDX-License-Identifier: Apache-2.0
"""tessera on Paddle tensors: the functions of ``tessera``, with gradients.

    o      = tessera.paddle.attention(q, k, v, causal=True)         # o.sum().backward() works
    o, lse = tessera.paddle.attention(q, k, v, causal=True, return_lse=True)
    print(tessera.paddle.explain(q, k, v, causal=True))             # which backend, why

Tensors are used where they are, whatever their strides. They run under recompute, amp and
paddle.jit.to_static; flashmask_attention has the signature of paddle.nn.functional's.
docs/semantics.md is the contract, docs/paddle.md this front end's page.
"""

import paddle

from .._lib import Refused

if (0, 0) < tuple(map(int, paddle.__version__.split(".")[:2])) < (3, 1):  # 0.0.0 is a build of its head
    raise ImportError(f"tessera.paddle: needs Paddle 3.1 or newer, and this is {paddle.__version__}; "
                      "pip install --upgrade paddlepaddle")

from ._flashmask import flashmask_attention  # noqa: E402
from ._functions import (alibi_slopes, attention, attention_backward, dropout_mask, explain,  # noqa: E402
                         merge)

__all__ = ["attention", "attention_backward", "merge", "explain", "dropout_mask", "alibi_slopes",
           "flashmask_attention", "Refused"]
