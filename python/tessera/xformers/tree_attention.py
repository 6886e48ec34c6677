# SPDX-License-Identifier: Apache-2.0
"""xformers.ops.tree_attention: attention of a tree of drafted tokens over a context and over the tree."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .fmha import memory_efficient_attention_partial, merge_attentions, triton_splitk

__all__ = ["SplitKAutotune", "TreeAttnMetadata", "construct_full_tree_choices", "construct_tree_choices",
           "get_full_tree_size", "tree_attention"]


class SplitKAutotune(triton_splitk.FwOp):
    """A name for prefix_op and suffix_op."""
    AUTOTUNE = True


@dataclass
class TreeAttnMetadata:
    """A tree of drafted tokens, and tensors that describe it. Nodes are in the order of tree_choices, a level after
    another; index 0 of what counts `nodes` is the root, and `choices` are the nodes without it.

        attention_bias         [nodes, nodes]: 0 where the column is the row's node, its ancestor or the root, else -inf
        tree_indices           int64 [nodes]: the drafted token of each; siblings of one rank share the token of a level
        retrieval_indices      int64 [leaves, depth + 1]: the nodes from the root to each leaf, then -1
        path_lengths           how many of these there are, for each leaf
        tree_seq_position_ids  int32 [nodes]: the level
        parent_node_indices    int64 [choices]: the parent's node
        child_node_indices     int64 [nodes, most children]: the children's choices, the last one again up to the end; 0
                               for leaves
        num_children_per_node  int64 [nodes]
        candidate_idx          int64 [choices]: the rank among its siblings
        num_nodes_per_level    int64 [levels], the root's first; subtree_sizes has its sums up to each level
        num_children_per_node_at_level   num_children_per_node, a tensor a level
    """
    tree_choices: Sequence[tuple[int, ...]]
    attention_bias: torch.Tensor
    tree_indices: torch.Tensor
    retrieval_indices: torch.Tensor
    path_lengths: list[int]
    tree_seq_position_ids: torch.Tensor
    parent_node_indices: torch.Tensor
    child_node_indices: torch.Tensor
    num_children_per_node: torch.Tensor
    candidate_idx: torch.Tensor
    num_nodes_per_level: torch.Tensor
    num_nodes_per_level_cpu: torch.Tensor
    num_children_per_node_at_level: list[torch.Tensor]
    num_children_per_node_at_level_cpu: list[torch.Tensor]
    subtree_sizes: list[int]

    @classmethod
    @functools.lru_cache
    def from_tree_choices_cached(cls, tree_choices, dtype=None, device=None) -> TreeAttnMetadata:
        """from_tree_choices of a tuple, kept."""
        return cls.from_tree_choices(tree_choices, dtype, device)

    @classmethod
    def from_tree_choices(cls, tree_choices: Sequence[tuple[int, ...]], dtype: torch.dtype | None = None,
                          device=None) -> TreeAttnMetadata:
        """Makes it of paths: (1, 0) is the first child of the second child of the root. dtype is that of
        attention_bias."""
        choices = sorted(set(map(tuple, tree_choices)), key=lambda path: (len(path), path))
        node = {(): 0, **{path: i for i, path in enumerate(choices, 1)}}
        for path in choices:
            if not path or path[:-1] not in node:
                raise ValueError(f"tessera.xformers.TreeAttnMetadata: tree_choices has {path}: must not be the root, "
                                 f"and come with its parent {path[:-1]}")
        nodes = list(node)
        children = {path: [] for path in nodes}
        for path in choices:
            children[path[:-1]].append(node[path] - 1)
        levels = [list(group) for _, group in itertools.groupby(nodes, key=len)]
        paths = [[node[leaf[:i]] for i in range(len(leaf) + 1)] for leaf in nodes if not children[leaf]]
        bias = torch.full((len(nodes), len(nodes)), -torch.inf, dtype=dtype)
        for path in nodes:
            bias[node[path], [node[path[:i]] for i in range(len(path) + 1)]] = 0
        token, below = {(): 0}, 0
        for level in levels[1:]:  # a level's tokens lie behind those of the levels above it
            token |= {path: below + path[-1] + 1 for path in level}
            below = max(token.values())

        def long(values):
            return torch.tensor(values, dtype=torch.int64, device=device)
        most = max(map(len, children.values())) or 1
        counts = [len(found) for found in children.values()]
        starts = [0, *itertools.accumulate(map(len, levels))]
        at_level = [counts[a:b] for a, b in itertools.pairwise(starts)]
        sizes = [len(level) for level in levels]
        return cls(
            tree_choices=choices, attention_bias=bias.to(device), tree_indices=long([token[path] for path in nodes]),
            retrieval_indices=long([path + [-1] * (len(levels) - len(path)) for path in paths]),
            path_lengths=[len(path) for path in paths],
            tree_seq_position_ids=torch.tensor([len(path) for path in nodes], dtype=torch.int32, device=device),
            parent_node_indices=long([node[path[:-1]] for path in choices]),
            child_node_indices=long([(found or [0]) + (found or [0])[-1:] * (most - max(len(found), 1))
                                     for found in children.values()]),
            num_children_per_node=long(counts),
            candidate_idx=long([children[path[:-1]].index(node[path] - 1) for path in choices]),
            num_nodes_per_level=long(sizes), num_nodes_per_level_cpu=torch.tensor(sizes, device="cpu"),
            num_children_per_node_at_level=[long(level) for level in at_level],
            num_children_per_node_at_level_cpu=[torch.tensor(level, device="cpu") for level in at_level],
            subtree_sizes=starts[1:])


def construct_tree_choices(branching: Sequence[int]) -> list[tuple[int, ...]]:
    """The paths of a tree whose nodes of level i have branching[i] children."""
    return [path for depth in range(len(branching)) for path in itertools.product(*map(range, branching[:depth + 1]))]


@functools.lru_cache
def construct_full_tree_choices(tree_depth: int, branching: int) -> list[tuple[int, ...]]:
    """construct_tree_choices of tree_depth levels below the root, with as many children everywhere."""
    return construct_tree_choices([branching] * tree_depth)


def get_full_tree_size(tree_depth: int, branching: int) -> int:
    """Nodes of a tree of tree_depth levels, the root's among them."""
    return sum(branching**i for i in range(tree_depth))


def tree_attention(q, spec_k, spec_v, cache_k, cache_v, spec_attn_bias, prefix_attn_bias, prefix_op=None,
                   suffix_op=None, autotune: bool = False, quantized_kv_scales=None) -> torch.Tensor:
    """Attention of q [b, tree, h, d] over cache_k, cache_v [b, s, h, d], whose lengths prefix_attn_bias knows, and over
    spec_k, spec_v [b, tree or more, h, d], seen as spec_attn_bias says; either may have groups, [b, s, g, h, d].

    prefix_attn_bias packs b sequences of `tree` queries, as BlockDiagonalPaddedKeysMask does; for a paged bias the
    cache is [1, tokens, h, d]. spec_attn_bias [tree, of spec_k] is added to the scores, such as
    TreeAttnMetadata.attention_bias. Gradients reach every tensor
    of floats, unless the cache is uint8: the bytes of e4m3, with quantized_kv_scales for cache_k and cache_v, int32
    [b, s, h] or [b, s, g, h], as triton_splitk.InputsFp8 has them. The ops and autotune have no effect.
    """
    if (quantized_kv_scales is not None) != (cache_k.dtype == cache_v.dtype == torch.uint8):
        raise ValueError(f"tessera.xformers.tree_attention: cache_k.dtype={cache_k.dtype}, cache_v.dtype="
                         f"{cache_v.dtype}: must be torch.uint8 with quantized_kv_scales, and only then")
    b, tree = q.shape[:2]
    if spec_attn_bias.shape != (tree, spec_k.shape[1]):
        raise ValueError(f"tessera.xformers.tree_attention: spec_attn_bias.shape={list(spec_attn_bias.shape)}: must be "
                         f"{[tree, spec_k.shape[1]]}, of q and spec_k")
    context, context_lse = _over_context(*(x.flatten(0, 1)[None] for x in (q, cache_k, cache_v)), prefix_attn_bias,
                                         prefix_op, quantized_kv_scales)
    drafts, drafts_lse = memory_efficient_attention_partial(q, spec_k, spec_v, spec_attn_bias, op=suffix_op)
    rows = context_lse[0].unflatten(-1, (b, tree)).movedim(-2, 0)
    return merge_attentions([context.reshape(drafts.shape), drafts], [rows, drafts_lse], write_lse=False,
                            output_dtype=q.dtype)[0]


def _over_context(q, cache_k, cache_v, bias, op, scales):
    """(out, lse) of what is in the cache."""
    if scales is None:
        return memory_efficient_attention_partial(q, cache_k, cache_v, bias, op=op)
    codes = [x.contiguous().view(torch.int32) for x in (cache_k, cache_v)]
    out, context = triton_splitk.FwOp.apply(
        triton_splitk.InputsFp8(q, *codes, bias, is_partial=True, k_fp8_scale_shift=scales[0].flatten(0, 1)[None],
                                v_fp8_scale_shift=scales[1].flatten(0, 1)[None]), needs_gradient=True)
    return out, context.lse
