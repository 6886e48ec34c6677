# SPDX-License-Identifier: Apache-2.0
"""FusedAttnHelper: whether libtessera can, and with how much workspace."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .... import jax as tessera_jax
from ...._explain import Explanation
from ..._config import FusedConfig
from ..._logging import AttentionLogging, logger, switch
from .. import _words
from .._enums import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVFormat, QKVLayout
from .._numbers import NVTE_Fused_Attn_Backend
from .._translate import Config
from .._words import error

_NAME = "FusedAttnHelper"


@dataclasses.dataclass
class FusedAttnParams(FusedConfig):
    """A call by its sizes and TE's numbers, of which transformer_engine_jax.get_fused_attn_backend reads what
    a layout of JAX has."""
    bias_batch_size: int = 0
    bias_num_heads: int = 0
    bias_seqlen_q: int = 0
    bias_seqlen_kv: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedAttnHelper:
    """A call by its sizes."""
    is_training: bool
    batch_size: int
    q_dtype: jnp.dtype
    kv_dtype: jnp.dtype
    qkv_layout: QKVLayout
    attn_bias_type: AttnBiasType
    attn_mask_type: AttnMaskType
    softmax_type: AttnSoftmaxType
    dropout_probability: float
    q_num_heads: int
    kv_num_heads: int
    q_max_seqlen: int
    kv_max_seqlen: int
    head_dim_qk: int
    head_dim_v: int
    window_size: tuple[int, int]
    return_max_logit: bool = False
    bottom_right_diagonal: bool = True  # of masks whose type does not say it, which no kernel here needs to know
    attn_scale: float = 1.0
    bias_batch: int | None = None
    bias_heads: int | None = None
    bias_seqlen_q: int | None = None
    bias_seqlen_kv: int | None = None
    max_segments_per_seq: int = 1

    def is_fused_attn_kernel_available(self) -> bool:
        return self.get_fused_attn_backend()[0] != NVTE_Fused_Attn_Backend.NVTE_No_Backend

    def get_fused_attn_backend(self, deterministic: bool | None = None) -> tuple[NVTE_Fused_Attn_Backend, str]:
        """(NVTE_F16_arbitrary_seqlen, "") where libtessera has a backend on JAX's device for each pass
        that will run, else (NVTE_No_Backend, every reason, one a line), which are logged too."""
        AttentionLogging.setup_logging()
        logger.debug("Running fused attention backend selection with config=%s", self)
        reasons = self.why_not(deterministic)
        for reason in reasons:
            logger.debug("Disabling FusedAttention due to %s", reason)
        if reasons:
            logger.info("No fused attention backend available; falling back to unfused attention.")
            return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "\n".join(reasons)
        backend = NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
        logger.info("Selected fused attention backend: %s", backend.name)
        return backend, ""

    def why_not(self, deterministic: bool | None = None) -> list[str]:
        """Why libtessera cannot; empty if it can."""
        if self.q_dtype != self.kv_dtype:
            return [f"kv_dtype={self.kv_dtype}: must be q_dtype, {self.q_dtype}"]
        try:
            passes = [self.explain(backward, deterministic)
                      for backward in ((False, True) if self.is_training else (False,))]
        except (ValueError, tessera_jax.Refused) as refusal:
            return [str(refusal)]
        return [f"{name}: {text}" for answer in passes if answer.backend is None
                for name, texts in answer.reasons.items() if name != "reference" for text in texts]

    def workspace_bytes(self, backward: bool, deterministic: bool | None = None) -> int:
        """Raises Refused where no backend can."""
        answer = self.explain(backward, deterministic)
        if answer.backend is None:
            raise tessera_jax.Refused(str(answer))
        return answer.workspace_bytes

    def explain(self, backward: bool = False, deterministic: bool | None = None) -> Explanation:
        """tessera.jax.explain of the call, on JAX's device."""
        config = Config(self.attn_bias_type, self.attn_mask_type, self.softmax_type, self.qkv_layout, self.attn_scale,
                        self.dropout_probability, self.is_training, self.max_segments_per_seq, self.window_size)
        struct = jax.ShapeDtypeStruct
        b, sq, sk = self.batch_size, self.q_max_seqlen, self.kv_max_seqlen
        rows = [(b, sq), (b, sk), (b, sk)]
        given = {"layout": "bshd", **config.band(), "softmax_scale": self.attn_scale}
        if config.is_thd:
            rows = [(b * s,) for b, s in rows]
            given["layout"] = "thd"
            n = b * self.max_segments_per_seq + 1
            for side, s in (("q", sq), ("k", sk)):
                given |= {f"cu_seqlens_{side}": struct((n,), jnp.int32),
                          f"cu_seqlens_{side}_padded": struct((n,), jnp.int32),
                          f"max_seqlen_{side}": s}
        elif self.attn_mask_type.is_padding():
            given |= {"seqlens_q": struct((b,), jnp.int32), "seqlens_k": struct((b,), jnp.int32)}
        grads = self._scores(config, given)
        if config.dropout_p:
            given |= {"dropout_p": config.dropout_p, "rng_state": jnp.zeros(4, jnp.uint32)}
        given["deterministic"] = (not self.is_non_deterministic_allowed() if deterministic is None
                                  else deterministic) or None
        tails = [(self.q_num_heads, self.head_dim_qk), (self.kv_num_heads, self.head_dim_qk),
                 (self.kv_num_heads, self.head_dim_v)]
        q, k, v = (struct((*row, *tail), jnp.dtype(self.q_dtype)) for row, tail in zip(rows, tails))
        if backward:
            return tessera_jax.explain(q, k, v, backward=True, grads=("dq", "dk", "dv", *grads),
                                       **given)
        return tessera_jax.explain(q, k, v, return_max_logit=self.return_max_logit, **given)

    def _scores(self, config: Config, given: dict) -> list[str]:
        """Adds bias and sink; returns the names of their gradients."""
        grads = []
        if self.attn_bias_type != AttnBiasType.NO_BIAS:
            if config.is_thd:
                raise error("attn_bias_type", self.attn_bias_type.name,
                            f"{self.qkv_layout.name} takes no bias", _NAME)
            shape = (self.bias_batch or 1, self.bias_heads or self.q_num_heads,
                     self.bias_seqlen_q or self.q_max_seqlen,
                     self.bias_seqlen_kv or self.kv_max_seqlen)
            given |= config.bias(jax.ShapeDtypeStruct(shape, jnp.dtype(self.q_dtype)))
            grads.append("dbias")
        if self.softmax_type == AttnSoftmaxType.LEARNABLE_SOFTMAX:
            given |= config.sink(jax.ShapeDtypeStruct((self.q_num_heads,), jnp.float32))
            grads.append("dsink")
        else:
            given |= config.sink()
        return grads

    @staticmethod
    def is_non_deterministic_allowed() -> bool:
        return bool(switch("NVTE_ALLOW_NONDETERMINISTIC_ALGO", 1))

    @staticmethod
    def parse_qkv_aval(q_aval, k_aval, v_aval, qkv_layout: QKVLayout):
        """(batch shape, q's and kv's lengths, q's and kv's heads, head dims of q and k and of v) of
        arrays, of which the packed layouts read the first one or two."""
        if qkv_layout.get_qkv_format() == QKVFormat.SBHD:
            raise _words.later("qkv_layout", qkv_layout.name, "SBHD for JAX",
                               "swap the first two axes", _NAME)
        if qkv_layout.is_qkvpacked():
            *batch, s, _, h, d = q_aval.shape
            return batch, s, s, h, h, d, d
        *batch, sq, hq, dqk = q_aval.shape
        if qkv_layout.is_kvpacked():
            *kv_batch, sk, _, hk, dv = k_aval.shape
        else:
            *kv_batch, sk, hk, _ = k_aval.shape
            dv = v_aval.shape[-1]
        if batch != kv_batch:
            raise error("k_aval.shape", tuple(k_aval.shape), f"must begin with q's {batch}", _NAME)
        return batch, sq, sk, hq, hk, dqk, dv
