# SPDX-License-Identifier: Apache-2.0
"""The four configurations of TransformerEngine's attention benchmark, and one pass through each."""

from __future__ import annotations

import contextlib
import dataclasses
import os

import torch

from tessera.te.pytorch import DotProductAttention
from tessera.te.pytorch.attention.dot_product_attention import _attention_backends

# TE's backends, and what its benchmarks call them.
LABELS = {"FusedAttention": "cuDNN", "FlashAttention": "flash-attn",
          "UnfusedDotProductAttention": "unfused"}
TITLES = {"FusedAttention": "cuDNN attention", "FlashAttention": "flash-attention",
          "UnfusedDotProductAttention": "unfused attention"}
SWITCHES = {"FusedAttention": "NVTE_FUSED_ATTN", "FlashAttention": "NVTE_FLASH_ATTN",
            "UnfusedDotProductAttention": "NVTE_UNFUSED_ATTN"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOLERANCE = 2.5e-2
NOTE = "cuDNN attention and flash-attention are TE's names: both run tessera's kernels here."


@dataclasses.dataclass(frozen=True)
class Config:
    b: int
    h: int
    hg: int
    d: int
    s: int
    mask: str
    bias: str = "no_bias"

    def reduced(self, factor: int) -> Config:
        """Shorter and with fewer heads, for a CPU."""
        group = self.h // self.hg
        heads = max(self.h // factor // group, 1) * group
        return dataclasses.replace(self, b=1, s=max(self.s // factor, 16), h=heads,
                                   hg=heads // group)

    def flops(self) -> float:
        """A forward and a backward pass have two and five products of s * s * d a head."""
        pairs = self.s * (self.s + 1) / 2 if "causal" in self.mask else self.s * self.s
        return 7 * 2 * self.b * self.h * pairs * self.d


CONFIGS = {
    "test_0": Config(2, 16, 16, 64, 512, "no_mask"),
    "test_1": Config(2, 16, 16, 128, 2048, "causal"),
    "test_2": Config(2, 16, 16, 128, 2048, "causal", "post_scale_bias"),
    "test_3": Config(2, 32, 4, 128, 8192, "causal"),
}


class Pass:
    """One configuration's inputs, the same for every backend; calling it runs forward and backward
    and returns out and the gradients."""

    def __init__(self, config: Config, dtype, device: str):
        generator = torch.Generator(device).manual_seed(1234)

        def draw(*shape):
            return torch.randn(*shape, generator=generator, dtype=dtype, device=device)

        c = config
        self.leaves = [draw(c.b, c.s, heads, c.d).requires_grad_() for heads in (c.h, c.hg, c.hg)]
        self.d_out = draw(c.b, c.s, c.h * c.d)
        self.given = dict(attn_mask_type=c.mask, core_attention_bias_type=c.bias)
        if c.bias != "no_bias":
            self.given["core_attention_bias"] = draw(1, c.h, c.s, c.s).requires_grad_()
            self.leaves.append(self.given["core_attention_bias"])
        self.module = DotProductAttention(c.h, c.d, num_gqa_groups=c.hg, qkv_format="bshd")

    def __call__(self):
        out = self.module(*self.leaves[:3], **self.given)
        return out, *torch.autograd.grad(out, self.leaves, self.d_out)


@contextlib.contextmanager
def only(backend: str):
    """TE's switches so that `backend` alone can run."""
    saved = {name: os.environ.get(name) for name in SWITCHES.values()}
    os.environ.update({name: str(int(one == backend)) for one, name in SWITCHES.items()})
    _attention_backends["backend_selection_requires_update"] = True
    try:
        yield
    finally:
        for name, value in saved.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        _attention_backends["backend_selection_requires_update"] = True


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def add_arguments(parser):
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default_device())
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--reduce", type=int, help="divide lengths and heads by this (8 on a CPU, "
                        "1 on a GPU)")


def parsed(parser):
    args = parser.parse_args()
    if args.reduce is None:
        args.reduce = 8 if args.device == "cpu" else 1
    return args


def config_of(name: str, args) -> Config:
    return CONFIGS[name] if args.reduce == 1 else CONFIGS[name].reduced(args.reduce)
