#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An arbitrary mask, and the same mask as a bias of a large negative number: the detour that TE's
fused path asks for. tessera runs both fused, and the mask needs half the memory.

    python benchmarks/te/arbitrary_mask_to_post_scale_bias.py
"""

import argparse

import torch

import common

MASK, BIAS = common.Config(4, 16, 16, 64, 2048, "arbitrary"), "post_scale_bias"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_arguments(parser)
    args = common.parsed(parser)
    config = MASK if args.reduce == 1 else MASK.reduced(args.reduce)
    dtype = common.DTYPES[args.dtype]
    run = common.Pass(config, dtype, args.device)
    generator = torch.Generator(args.device).manual_seed(1234)
    hidden = torch.rand(config.b, config.h, config.s, config.s, generator=generator,
                        device=args.device) < 0.95  # as dense as TE's: most pairs are hidden
    hidden[..., 0] = False  # a bias cannot hide a whole row; a mask can
    lowest = -2.0**15 if dtype == torch.float16 else -2.0**50

    print("Run with post_scale_bias:")
    run.given = dict(attn_mask_type="no_mask", core_attention_bias_type=BIAS,
                     core_attention_bias=torch.zeros(1, dtype=dtype, device=args.device)
                     .masked_fill(hidden, lowest))
    with_bias = run()

    print("Run with arbitrary mask:")
    run.given = dict(attn_mask_type="arbitrary", attention_mask=hidden)
    with_mask = run()

    for parts in zip(with_mask, with_bias):
        torch.testing.assert_close(*parts, atol=common.TOLERANCE, rtol=common.TOLERANCE)
    print("Test passed!")


if __name__ == "__main__":
    main()
