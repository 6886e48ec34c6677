#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One configuration through two of TE's backends, compared. To see how they are chosen:

    NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 python benchmarks/te/example_attention.py
"""

import argparse

import torch

import common


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_arguments(parser)
    parser.add_argument("--config", choices=common.CONFIGS, default="test_0")
    args = common.parsed(parser)

    run = common.Pass(common.config_of(args.config, args), common.DTYPES[args.dtype], args.device)
    results = []
    for backend in ("FusedAttention", "FlashAttention"):
        print()
        print(f"Run {common.TITLES[backend]}...")
        with common.only(backend):
            results.append(run())
    for parts in zip(*results):
        torch.testing.assert_close(*parts, atol=common.TOLERANCE, rtol=common.TOLERANCE)
    print()
    print("Test passed.")


if __name__ == "__main__":
    main()
