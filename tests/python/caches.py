# SPDX-License-Identifier: Apache-2.0
"""What append_kv is tested with."""

import numpy as np


def problem(seed=0, b=3, s=4, hk=2, hq=4, dqk=16, dv=8, dtype=np.float32, cache=None, page=None):
    """Keywords of append_kv whose caches are full of NaN."""
    rng = np.random.default_rng(seed)
    cache = dtype if cache is None else cache
    shape = (b, 40) if page is None else (b * -(-40 // page) + 2, page)
    given = {"k": rng.standard_normal((b, s, hk, dqk)).astype(dtype),
             "v": rng.standard_normal((b, s, hk, dv)).astype(dtype),
             "k_cache": np.full((*shape, hk, dqk), np.nan).astype(cache),
             "v_cache": np.full((*shape, hk, dv), np.nan).astype(cache),
             "seqlens_k": np.array([0, 17, 36][:b])}
    if page is not None:
        given["page_table"] = rng.permutation(shape[0])[:b * -(-40 // page)].reshape(b, -1).astype(np.int32)
    return given
