# SPDX-License-Identifier: Apache-2.0
"""TE's numbers that every framework shares."""

import enum


class DType(enum.IntEnum):
    """TE's tags of dtypes. Callers of PyTorch's fused_attn_fwd pass one as fake_dtype, where the
    dtype of q speaks for itself."""
    kByte, kInt32, kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2 = 0, 2, 4, 5, 6, 7, 8
