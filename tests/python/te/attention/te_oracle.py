# SPDX-License-Identifier: Apache-2.0
"""TE's attention written out in fp64 PyTorch, one sequence and head at a time, pair by pair."""

from __future__ import annotations

import dataclasses
import math

import pytest

torch = pytest.importorskip("torch")

from tessera.te.pytorch.attention.dot_product_attention.backends import FusedAttnFwdArgs  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention import _attention_backends  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention._choice import _selection  # noqa: E402

MASKS = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right",
         "padding_causal_bottom_right", "arbitrary")
HEADS = 4


@pytest.fixture
def fresh_selection(monkeypatch, one_device):
    """No switch is set, there is no GPU beside tests on the CPU, and nothing has been selected yet."""
    for name in _selection.SWITCHES:
        monkeypatch.delenv(name, raising=False)
    _attention_backends["backend_selection_requires_update"] = True


@dataclasses.dataclass
class Problem:
    """A batch of two in [b, s, h, d], and TE's options. Packed, it has gaps of `gap` tokens."""
    mask: str
    format: str = "bshd"
    sq: int = 7
    sk: int = 9
    lens_q: tuple = (5, 7)
    lens_k: tuple = (9, 6)
    groups: int = HEADS
    dqk: int = 8
    dv: int = 8
    window: tuple | None = None
    bottom_right: bool | None = None
    bias: str = "no_bias"
    bias_shape: str = "bhss"
    slopes: tuple = ()           # shape of custom slopes
    softmax: str = "vanilla"
    max_logit: bool = False
    softcap: float = 0.0
    dropout: float = 0.0
    by_mask: bool = False        # padding by attention_mask, with holes
    gap: int = 0
    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        generator = torch.Generator("cpu").manual_seed(7)  # the same numbers on every device

        def drawn(how, *shape):
            return how(*shape, generator=generator, device="cpu").to(torch.get_default_device())

        def draw(*shape):
            return drawn(torch.randn, *shape).to(self.dtype)

        self.q = draw(2, self.sq, HEADS, self.dqk)
        self.k = draw(2, self.sk, self.groups, self.dqk)
        self.v = draw(2, self.sk, self.groups, self.dv)
        self.do = draw(2, self.sq, HEADS, self.dv)
        extents = dict(zip("bhss", (2, HEADS, self.sq)))
        shape = [1 if axis == "1" else extents[axis] for axis in self.bias_shape]
        shape[2:] = [1 if self.bias_shape[2] == "1" else self.sq, self.sk]
        self.core_bias = draw(*shape)
        self.custom = drawn(torch.rand, *self.slopes) if self.slopes else None
        self.offset = draw(HEADS).float()
        self.hidden_pairs = drawn(torch.rand, 2, 1, self.sq, self.sk) < 0.4
        self.hidden_q = torch.arange(self.sq) >= torch.tensor(self.lens_q)[:, None]
        self.hidden_k = torch.arange(self.sk) >= torch.tensor(self.lens_k)[:, None]
        if self.by_mask:
            self.hidden_q = drawn(torch.rand, 2, self.sq) < 0.3
            self.hidden_k = self.hidden_q if self.sq == self.sk else drawn(torch.rand, 2, self.sk) < 0.3
        if not self.padded:
            self.hidden_q = torch.zeros_like(self.hidden_q)
            self.hidden_k = torch.zeros_like(self.hidden_k)

    @property
    def padded(self):
        return "padding" in self.mask or self.format == "thd"

    # ---- layouts ----

    def stored(self, x, lens):
        """[b, s, h, d] in the problem's format; NaN where there is no token of a packed tensor."""
        if self.format == "bshd":
            return x.clone()
        if self.format == "sbhd":
            return x.transpose(0, 1).contiguous()
        parts = []
        for n, length in enumerate(lens):
            parts += [x[n, :length], x.new_full((self.gap, *x.shape[2:]), math.nan)]
        return torch.cat(parts)

    def loaded(self, x, lens, s):
        """The inverse, with zeros outside the sequences."""
        if self.format == "bshd":
            return x
        if self.format == "sbhd":
            return x.transpose(0, 1)
        out, start = x.new_zeros(2, s, *x.shape[1:]), 0
        for n, length in enumerate(lens):
            out[n, :length] = x[start:start + length]
            start += length + self.gap
        return out

    def cumulative(self, lens, gap=0):
        return torch.tensor([0, lens[0] + gap, sum(lens) + 2 * gap], dtype=torch.int32)

    # ---- the answer ----

    def shift(self, n):
        bottom_right = self.mask.endswith("bottom_right") or \
            self.mask not in ("causal", "padding_causal") and self.bottom_right is not False
        if not bottom_right:
            return 0
        return int((~self.hidden_k[n]).sum()) - int((~self.hidden_q[n]).sum())

    def visible(self, n, i, j):
        left, right = self.window or (-1, -1)
        right = 0 if "causal" in self.mask else right
        ahead = j - i - self.shift(n)
        return not (self.hidden_q[n, i] or self.hidden_k[n, j] or
                    left >= 0 and ahead < -left or right >= 0 and ahead > right or
                    self.mask == "arbitrary" and self.hidden_pairs[n, 0, i, j])

    def expected(self, keep=None):
        """{name: fp64 tensor} of out, max_logit and all gradients."""
        wide = {name: x.double().requires_grad_() for name, x in (
            ("q", self.q), ("k", self.k), ("v", self.v), ("bias", self.core_bias),
            ("offset", self.offset))}
        slopes = self.custom
        if slopes is None:
            slopes = torch.tensor([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)])
        slopes = slopes.double().expand(2, HEADS)
        bias = wide["bias"].expand(2, HEADS, self.sq, self.sk)
        out, peak = [], torch.full((HEADS,), -math.inf, dtype=torch.float64)
        for n in range(2):
            seen = torch.tensor([[self.visible(n, i, j) for j in range(self.sk)]
                                 for i in range(self.sq)])
            for h in range(HEADS):
                g = h * self.groups // HEADS
                scores = wide["q"][n, :, h] @ wide["k"][n, :, g].T
                if self.bias == "pre_scale_bias":
                    scores = scores + bias[n, h]
                scores = scores / math.sqrt(self.dqk)
                if self.softcap:
                    scores = self.softcap * torch.tanh(scores / self.softcap)
                if self.bias == "post_scale_bias":
                    scores = scores + bias[n, h]
                if self.bias == "alibi":
                    i, j = torch.arange(self.sq)[:, None], torch.arange(self.sk)
                    scores = scores - slopes[n, h] * (i + self.shift(n) - j).abs()
                if seen.any():
                    peak[h] = torch.maximum(peak[h], scores[seen].max().detach())
                weights = torch.where(seen, scores, 0).exp() * seen
                total = weights.sum(-1, keepdim=True)
                if self.softmax != "vanilla":
                    sink = 0 * wide["offset"][h] if self.softmax == "off-by-one" else \
                        wide["offset"][h]
                    total = total + sink.exp()
                p = weights / torch.where(total == 0, 1, total)
                if keep is not None:
                    p = p * keep[n, h] * (65536 / (65536 - int(self.dropout * 65536 + 0.5)))
                out.append(p @ wide["v"][n, :, g])
        out = torch.stack(out).view(2, HEADS, self.sq, self.dv).transpose(1, 2)
        inside = ~self.hidden_q[:, :, None, None]
        (out * torch.where(inside, self.do.double(), 0)).sum().backward()
        answer = {f"d{name}": x.grad for name, x in wide.items() if x.grad is not None}
        return {**answer, "out": out.detach(), "max_logit": peak}


def fwd_args(**given):
    """FusedAttnFwdArgs with what TE's FusedAttention says of a plain dense call."""
    words = dict(is_training=True, dropout_p=0.0, fast_zero_fill=True, qkv_layout="bshd_bshd_bshd",
                 attn_bias_type="no_bias", attn_mask_type="no_mask", softmax_type="vanilla", window_size=(-1, -1),
                 fused_attention_backend=1, deterministic=False, use_FAv2_bwd=False, return_max_logit=False, fp8=False,
                 fp8_output=False, bf16_backward=False)
    fields = [field.name for field in dataclasses.fields(FusedAttnFwdArgs)]
    return FusedAttnFwdArgs(**{name: {**words, **given}.get(name) for name in fields})
