#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the doors add to the host's time of one call of tessera.torch.attention on the same tensors, on a problem of
one sequence, 2 heads of 64 and one or a few tokens, whose arithmetic is next to nothing.

    taskset -c 1 python benchmarks/doors_host_cost.py [--device cuda] [--tokens 8] [--calls 50] [--repeat 2000]

Microseconds, without gradients, one thread: medians of the repetitions, and the fastest. Both calls of a row take
turns, so that other programs disturb both. A door that cannot be imported is left out; on a GPU nothing is waited for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import types

import torch

import tessera.torch

HEADS, DIM = 2, 64
SCALE = 0.1
GOAL = 3.0  # microseconds
attention = tessera.torch.attention


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--calls", type=int, default=200)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    columns = f"{'door':>8}{'torch':>8}{'adds':>8}"
    print(f"{'us a call on ' + args.device:<34}{columns}  fastest:{columns}")
    added = {}
    for rows in (transformers, transformer_engine, comfyui):
        with torch.inference_mode() if rows is comfyui else torch.no_grad():  # as ComfyUI calls
            try:
                found = rows(args.tokens, args.device)
            except ImportError as missing:
                print(f"{rows.__name__}: {missing}", file=sys.stderr)
                continue
            for name, pair in found.items():
                door, base = timed(pair, args)
                middle, least = ([statistic(x) for x in (door, base)] for statistic in (statistics.median, min))
                added[name] = middle[0] - middle[1]
                print(f"{name:<34}{middle[0]:8.1f}{middle[1]:8.1f}{added[name]:8.1f}"
                      f"{' ' * 10}{least[0]:8.1f}{least[1]:8.1f}{least[0] - least[1]:8.1f}")
    print(f"goal: a door adds {GOAL:.0f} us at most; the largest median is {max(added.values()):.1f}")
    return added


def timed(pair, args) -> list[list[float]]:
    """Times of one call of each of the pair, in microseconds."""
    times = [[], []]
    for _ in range(args.repeat + 1):
        for call, found in zip(pair, times):
            start = time.perf_counter_ns()
            for _ in range(args.calls):
                call()
            found.append((time.perf_counter_ns() - start) / args.calls / 1e3)
            if args.device != "cpu":
                torch.cuda.synchronize()
    return [found[1:] for found in times]


def bshd(tokens, device):
    return [torch.randn(1, tokens, HEADS, DIM, device=device) for _ in range(3)]


def packed(tokens, device):
    """(lengths of one sequence, as the door and attention have them)."""
    cu = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    return cu, dict(layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=tokens, max_seqlen_k=tokens,
                    causal=True, align="bottom_right", softmax_scale=SCALE)


def transformers(tokens, device) -> dict:
    """attn_implementation="tessera", TRL and the hub kernel: a model's call of one function."""
    import tessera.hf

    q, k, v = bshd(tokens, device)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    module = torch.nn.Module()
    module.is_causal = True
    causal = tessera.hf.attention_mask(1, tokens, tokens, device=device)
    padded = tessera.hf.attention_mask(1, tokens, tokens,
                                       attention_mask=torch.ones(1, tokens, dtype=torch.bool, device=device))
    ranges, visible = padded.plain(), torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=device)
    cu, lengths = packed(tokens, device)
    theirs = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=tokens, max_length_k=tokens)
    top_left = dict(causal=True, align="top_left", softmax_scale=SCALE)

    def door(mask, **more):
        return lambda: tessera.hf.attention_forward(module, *heads_first, mask, dropout=0.0, scaling=SCALE,
                                                    position_ids=None, use_cache=True, **more)

    def base(**keywords):
        return lambda: attention(q, k, v, **keywords)

    rows = [x[0] for x in (q, k, v)]
    return {"transformers": (door(None), base(**top_left) if tokens > 1 else base(softmax_scale=SCALE)),
            "transformers, causal mask": (door(causal), base(**top_left)),
            "transformers, key ranges": (door(padded), base(key_ranges=ranges, softmax_scale=SCALE)),
            "transformers, boolean mask": (door(visible), base(keep=visible, softmax_scale=SCALE)),
            "transformers, packed": (door(None, **theirs), lambda: attention(*rows, **lengths))}


def transformer_engine(tokens, device) -> dict:
    """NVTE_PLUGIN: TE's words, to a module that has what the plugin reads of TE's."""
    from tessera.te import plugin

    module = types.SimpleNamespace(softmax_scale=SCALE, attention_dropout=0.0, training=False, deterministic=False,
                                   softmax_type="vanilla", return_max_logit=False, _plans={})
    q, k, v = (x.transpose(0, 1) for x in bshd(tokens, device))
    rows = [x[:, 0] for x in (q, k, v)]
    cu, lengths = packed(tokens, device)
    theirs = dict(cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=tokens, max_seqlen_kv=tokens, window_size=(-1, 0))

    def door(tensors, **words):
        return lambda: plugin._forward(module, *tensors, {**theirs, **words})

    return {"TransformerEngine": (
                door((q, k, v), qkv_layout="sbhd_sbhd_sbhd", attn_mask_type="causal"),
                lambda: attention(q, k, v, layout="sbhd", causal=True, align="top_left", softmax_scale=SCALE)),
            "TransformerEngine, packed": (
                door(rows, qkv_layout="thd_thd_thd", attn_mask_type="padding_causal"),
                lambda: attention(*rows, **lengths))}


def comfyui(tokens, device) -> dict:
    """The node's override, as ComfyUI calls it."""
    from tessera.doors import comfyui as door

    q, k, v = bshd(tokens, device)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    rows = [x.flatten(-2) for x in (q, k, v)]
    override = door.override()
    options = {"optimized_attention_override": override}

    return {"ComfyUI": (lambda: override(None, *rows, HEADS, transformer_options=options),
                        lambda: attention(q, k, v)),
            "ComfyUI, its views alone": (
                lambda: [x.reshape(1, -1, HEADS, DIM) for x in rows] and q.flatten(-2), lambda: None),
            "ComfyUI, skip_reshape": (
                lambda: override(None, *heads_first, HEADS, skip_reshape=True, transformer_options=options),
                lambda: attention(*heads_first, layout="bhsd"))}


if __name__ == "__main__":
    main()
