# SPDX-License-Identifier: Apache-2.0
"""TE's context parallelism through tessera.te: every exchange and format on two to four processes over
gloo, against the same module on one; and the helpers around it."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tessera.te.transformer_engine_torch as tex  # noqa: E402
from cp_pool import Pool  # noqa: E402
from cp_ranks import DEVICE  # noqa: E402
from tessera.te.common.recipe import DelayedScaling  # noqa: E402
from tessera.te.pytorch import (  # noqa: E402
    DotProductAttention, MultiheadAttention, RotaryPositionEmbedding, TransformerLayer)
from tessera.te.pytorch.constants import CPLoadBalancingStrategy  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention import context_parallel as te_cp  # noqa: E402
from tessera.te.pytorch.quantization import (DelayedScalingRecipeState, FP8GlobalStateManager,  # noqa: E402
                                             autocast)

pytestmark = pytest.mark.xdist_group("gloo")
HEADS, GROUPS, DIM = 4, 2, 16


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    pool = Pool(tmp_path_factory.mktemp("gloo"))
    yield pool
    pool.close()


def chunks(x, axis, rank, size):
    """TE's two chunks of a padded batch."""
    parts = x.chunk(2 * size, axis)
    return torch.cat([parts[rank], parts[2 * size - 1 - rank]], axis)


def compare(rank, group, size, kind, words, module_words, cu, cu_padded, s=32):
    """This rank's rows of the output and of the gradients, through both."""
    torch.manual_seed(0)
    layout = words["qkv_format"]
    shape = {"bshd": (2, s), "sbhd": (s, 2), "thd": (cu_padded[-1],) if cu_padded else (0,)}[layout]
    x = [torch.randn(*shape, h, DIM) for h in (HEADS, GROUPS, GROUPS)]
    extra = dict(words)
    if cu is not None:
        lengths = torch.tensor(cu, dtype=torch.int32)
        extra |= dict(cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
        if layout == "thd":
            padded = torch.tensor(cu_padded, dtype=torch.int32)
            extra |= dict(cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded)
    module = DotProductAttention(HEADS, DIM, GROUPS, **module_words)
    if module.softmax_type == "learnable":
        torch.nn.init.normal_(module.softmax_offset)
    if layout == "thd":
        index = tex.thd_get_partitioned_indices(padded, shape[0], size, rank).long()
        own = lambda y: y.index_select(0, index)  # noqa: E731
    else:
        own = lambda y: chunks(y, layout.index("s"), rank, size)  # noqa: E731
    bias = extra.get("core_attention_bias")
    local_words = extra if bias is None else dict(
        extra, core_attention_bias=chunks(bias, 2, rank, size) if bias.shape[2] > 1 else bias)
    whole, local = [y.clone().requires_grad_() for y in x], [own(y).requires_grad_() for y in x]
    want = module(*whole, **extra)
    want_offset = None
    wants = torch.autograd.grad(want.square().sum(), whole, retain_graph=True)
    if module.softmax_type == "learnable":
        want_offset, = torch.autograd.grad(want.square().sum(), module.softmax_offset)
    module.set_context_parallel_group(list(group) if isinstance(group, tuple) else group,
                                      list(range(size)), None, kind)
    out = module(*local, **local_words)
    grads = torch.autograd.grad(out.square().sum(), [*local, *([module.softmax_offset]
                                                              if want_offset is not None else [])])
    torch.testing.assert_close(out, own(want))
    for got, full in zip(grads, wants):
        torch.testing.assert_close(got, own(full), rtol=1e-4, atol=1e-4)
    module.set_context_parallel_group(None, None, None)
    torch.testing.assert_close(module(*whole, **extra), want)
    return None if want_offset is None else (grads[3], want_offset)


KINDS = [("p2p", 2, 1), ("all_gather", 2, 1), ("a2a", 2, 1), ("a2a+p2p", 4, 2), ("p2p", 3, 1)]


@pytest.mark.parametrize("kind, size, inner", KINDS)
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("mask, window", [("causal", None), ("no_mask", None), ("causal", (9, 0)),
                                          ("causal_bottom_right", None)])
def test_padded_formats(pool, kind, size, inner, layout, mask, window):
    s = 8 * size
    pool.run(compare, size, inner, size, kind, dict(
        qkv_format=layout, attn_mask_type=mask, window_size=window), {}, None, None, s)


@pytest.mark.parametrize("kind, size, inner", KINDS)
@pytest.mark.parametrize("mask", ["padding", "padding_causal"])
def test_packed(pool, kind, size, inner, mask):
    lengths, step = [13, 0, 40, 21], 2 * size
    padded = [-(-n // step) * step for n in lengths]
    pool.run(compare, size, inner, size, kind, dict(qkv_format="thd", attn_mask_type=mask), {},
             np.cumsum([0, *lengths]).tolist(), np.cumsum([0, *padded]).tolist())


def one_chunk(rank, group, size, kind, mask, window):
    """NO_LOAD_BALANCE: this rank's share of the packed buffer, padding included, where it lies."""
    torch.manual_seed(0)
    cu, padded = (torch.tensor(x, dtype=torch.int32) for x in ([0, 13, 13, 53, 70], [0, 16, 18, 60, 84]))
    x = [torch.randn(84, h, DIM) for h in (HEADS, GROUPS, GROUPS)]
    words = dict(qkv_format="thd", attn_mask_type=mask, window_size=window, cu_seqlens_q=cu, cu_seqlens_kv=cu,
                 cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded)
    alone = CPLoadBalancingStrategy.NO_LOAD_BALANCE
    index = te_cp.get_thd_partitioned_indices(padded, 84, size, rank, None, alone)
    batch = te_cp.get_batch_on_this_cp_rank(padded, torch.arange(84), None, None, group, cp_rank=rank,
                                            load_balancing_strategy=alone) if size == 2 else (index,)
    assert torch.equal(batch[0], index)
    whole, local = [y.clone().requires_grad_() for y in x], [y[index].requires_grad_() for y in x]
    module = DotProductAttention(HEADS, DIM, GROUPS)
    want = module(*whole, **words)
    wants = torch.autograd.grad(want.square().sum(), whole)
    module.set_context_parallel_group(list(group) if isinstance(group, tuple) else group, None, None, kind, alone)
    out = module(*local, **words)
    torch.testing.assert_close(out, want[index])
    for got, full in zip(torch.autograd.grad(out.square().sum(), local), wants):
        torch.testing.assert_close(got, full[index], rtol=1e-4, atol=1e-4)
    for bad, said in ((dict(words, qkv_format="bshd"), 'must be DUAL_CHUNK_SWAP for qkv_format="bshd"'),
                      (dict(words, cu_seqlens_q_padded=padded + padded.sign()), "the last must be a multiple of size")):
        with pytest.raises(ValueError, match=said):
            module(*(y[None] if bad["qkv_format"] == "bshd" else y for y in local), **bad)
    with pytest.raises(ValueError, match="load_balancing_strategy='none': must be a CPLoadBalancingStrategy"):
        module.set_context_parallel_group(group, None, None, "p2p", "none")


@pytest.mark.parametrize("kind, size, inner", KINDS)
@pytest.mark.parametrize("mask, window", [("padding_causal", None), ("padding", (7, 3))])
def test_one_chunk_a_rank(pool, kind, size, inner, mask, window):
    pool.run(one_chunk, size, inner, size, kind, mask, window)


@pytest.mark.parametrize("kind, size, inner", KINDS)
def test_lengths_of_a_padded_batch(pool, kind, size, inner):
    s = 8 * size
    pool.run(compare, size, inner, size, kind,
             dict(qkv_format="bshd", attn_mask_type="padding_causal"), {}, [0, s - 3, s + 2], None, s)


@pytest.mark.parametrize("kind, size, inner", KINDS)
@pytest.mark.parametrize("softmax", ["off-by-one", "learnable"])
def test_sinks(pool, kind, size, inner, softmax):
    found = pool.run(compare, size, inner, size, kind,
                     dict(qkv_format="bshd", attn_mask_type="causal"), dict(softmax_type=softmax),
                     None, None, 8 * size)
    if softmax == "learnable":
        torch.testing.assert_close(sum(own for own, _ in found), found[0][1])


@pytest.mark.parametrize("kind", ["p2p", "all_gather"])
@pytest.mark.parametrize("shape", [(1, HEADS, 32, 32), (2, 1, 32, 32), (1, 1, 1, 32)])
def test_biases(pool, kind, shape):
    torch.manual_seed(1)
    pool.run(compare, 2, 1, 2, kind, dict(
        qkv_format="bshd", attn_mask_type="causal", core_attention_bias_type="post_scale_bias",
        core_attention_bias=torch.randn(shape)), {}, None, None)


def by_function(rank, group):
    torch.manual_seed(0)
    x = [torch.randn(2, 32, h, DIM) for h in (HEADS, GROUPS, GROUPS)]
    want = DotProductAttention(HEADS, DIM, GROUPS, qkv_format="bshd", softcap=0.5)(*x)
    out = te_cp.attn_forward_func_with_cp(
        True, *(chunks(y, 1, rank, 2) for y in x), None, None, 32, 32, None, None, 0.0, group, [0, 1],
        None, "all_gather", attn_mask_type="causal", softcap=0.5)
    torch.testing.assert_close(out.flatten(-2), chunks(want, 1, rank, 2))


def test_function(pool):
    pool.run(by_function, 2, 1)


def layers(rank, group, size, kind, layout, by_constructor):
    """A TransformerLayer and a MultiheadAttention, rotary embeddings among them, against one rank's."""
    groups = list(group) if isinstance(group, tuple) else group
    cp = dict(cp_group=groups, cp_global_ranks=list(range(size)), cp_stream=None, cp_comm_type=kind)
    common = dict(attention_dropout=0.0, num_gqa_groups=GROUPS, device=DEVICE)
    makes = [lambda **more: MultiheadAttention(64, HEADS, qkv_format=layout, **common, **more),
             lambda **more: TransformerLayer(64, 96, HEADS, hidden_dropout=0.0, attn_input_format=layout,
                                             **common, **more)]
    s = 8 * size
    shape = {"bshd": (2, s, 64), "sbhd": (s, 2, 64), "thd": (3 * s, 64)}[layout]
    freqs, words = RotaryPositionEmbedding(DIM)(2 * s), {}
    if layout == "thd":
        cu = torch.tensor([0, s, 3 * s], dtype=torch.int32)
        words = dict(cu_seqlens_q=cu, cu_seqlens_kv=cu)
        index = tex.thd_get_partitioned_indices(cu, 3 * s, size, rank).long()
    for make in makes:
        torch.manual_seed(0)
        module, x = make(), torch.randn(shape)
        mask = "padding_causal" if layout == "thd" else "causal"
        more = dict(words, rotary_pos_emb=freqs, **(
            {"attn_mask_type": mask} if isinstance(module, MultiheadAttention) else {"self_attn_mask_type": mask}))
        own = x.index_select(0, index) if layout == "thd" else chunks(x, layout.index("s"), rank, size)
        want = module(x, **more)
        if by_constructor:
            other = make(**cp)
            other.load_state_dict(module.state_dict())
            module = other
        else:
            module.set_context_parallel_group(*cp.values())
        out = module(own, **more)
        torch.testing.assert_close(out, want.index_select(0, index) if layout == "thd" else
                                   chunks(want, layout.index("s"), rank, size))
        module.set_context_parallel_group(None, None, None)
        torch.testing.assert_close(module(x, **more), want)


@pytest.mark.parametrize("kind, size, inner, layout, by_constructor", [
    ("p2p", 2, 1, "bshd", True), ("all_gather", 3, 1, "sbhd", False), ("a2a+p2p", 4, 2, "thd", True)])
def test_layers(pool, kind, size, inner, layout, by_constructor):
    pool.run(layers, size, inner, size, kind, layout, by_constructor)


def training(rank, group):
    """Dropout is one mask over all ranks, and checkpointing repeats it."""
    torch.manual_seed(rank)
    module = DotProductAttention(HEADS, DIM, GROUPS, attention_dropout=0.3, qkv_format="bshd",
                                 cp_group=group, cp_global_ranks=[0, 1], cp_comm_type="a2a")
    generator = torch.Generator(DEVICE).manual_seed(5)
    whole = [torch.randn(1, 32, h, DIM, generator=generator) for h in (HEADS, GROUPS, GROUPS)]
    results = []
    for checkpointing in (False, True):
        x = [chunks(y, 1, rank, 2).requires_grad_() for y in whole]
        torch.manual_seed(10 + rank)
        out = module(*x, checkpoint_core_attention=checkpointing)
        results.append([out.detach(), *torch.autograd.grad(out.sum(), x)])
    torch.manual_seed(10)
    state = torch.randint(2**63 - 1, (2,), dtype=torch.int64)
    import tessera.torch as tt
    want = tt.attention(*whole, causal=True, dropout_p=0.3, rng_state=state)
    torch.testing.assert_close(results[0][0], chunks(want.flatten(-2), 1, rank, 2))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def fp8_scales(rank, group, reduce_amax):
    """Scales of a rank that saw 1 + rank in slot 0 and, of the backward pass, 8 >> rank in slot 1."""
    FP8GlobalStateManager.reset()
    recipe = DelayedScaling(reduce_amax=reduce_amax, amax_history_len=2)
    states = [DelayedScalingRecipeState(recipe, mode=mode, num_quantizers=2, device=DEVICE)
              for mode in ("forward", "backward")]
    meta = {"scaling_fwd": states[0], "scaling_bwd": states[1], "fp8_group": group}
    FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(meta)
    with autocast(recipe=recipe, amax_reduction_group=group):
        states[0].make_quantizers()[0](torch.tensor([1.0 + rank]))
    states[1].make_quantizers()[1](torch.tensor([float(8 >> rank)]))
    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
    return [state.scale.tolist() for state in states]


def test_ranks_share_amaxes(pool):
    assert pool.run(fp8_scales, 2, 1, True) == [[[224, 1], [1, 57344 / 8]]] * 2
    assert pool.run(fp8_scales, 2, 1, False) == [[[448, 1], [1, 57344 / 8]], [[224, 1], [1, 57344 / 4]]]


def test_dropout(pool):
    pool.run(training, 2, 1)


def refuse(rank, group):
    texts = []
    for change in (dict(cp_comm_type="ring"), dict(cp_comm_type="a2a+p2p")):
        try:
            DotProductAttention(HEADS, DIM, cp_group=group, **change)
        except ValueError as error:
            texts.append(str(error))
    module = DotProductAttention(HEADS, DIM, qkv_format="bshd", cp_group=group)
    x = [torch.randn(1, 7, HEADS, DIM) for _ in range(3)]
    try:
        module(*x)
    except ValueError as error:
        texts.append(str(error))
    return texts


def test_bad_input(pool):
    first, second = pool.run(refuse, 2, 1)
    assert first == second
    assert "must be one of \"p2p\"" in first[0] and "[a2a_group, p2p_group]" in first[1]
    assert "odd number of rows" in first[2] and "Shards need no padding" in first[2]


# ---- helpers, in one process ----

@pytest.mark.parametrize("size", [2, 3])
def test_helpers_deal_tokens_as_te_does(size):
    lengths = torch.tensor([5, 12, 1, 8])
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    ids, labels = torch.arange(26), torch.arange(26) + 100
    ids_padded, labels_padded, padded = te_cp.pad_thd_sequences_for_cp(
        ids, labels, cu, 2 * size, padding_token_id=-1)
    positions = te_cp.generate_positional_ids_for_cp(cu, 2 * size)
    extents = -(-lengths // (2 * size)) * 2 * size
    assert padded.tolist() == [0, *extents.cumsum(0).tolist()] and padded.dtype == cu.dtype
    for n in range(4):
        at = int(padded[n])
        assert ids_padded[at:at + lengths[n]].tolist() == ids[cu[n]:cu[n + 1]].tolist()
        assert (ids_padded[at + lengths[n]:padded[n + 1]] == -1).all()
        assert (labels_padded[at + lengths[n]:padded[n + 1]] == -100).all()
        assert positions[at:padded[n + 1]].tolist() == list(range(extents[n]))
    for rank in range(size):
        index = tex.thd_get_partitioned_indices(padded, int(padded[-1]), size, rank).long()
        want = torch.cat([torch.cat([part[rank], part[2 * size - 1 - rank]]) for part in
                          (torch.arange(int(a), int(b)).chunk(2 * size)
                           for a, b in zip(padded, padded[1:]))])
        assert index.tolist() == want.tolist()
        for first, second in ((True, True), (True, False), (False, True)):
            counted = te_cp.get_cu_seqlens_on_cp_rank(cu, padded // size, size, rank, first, second)
            held = [0]
            for n in range(4):
                chunk = int(extents[n]) // (2 * size)
                numbers = [rank] * first + [2 * size - 1 - rank] * second
                held.append(held[-1] + sum(min(max(int(lengths[n]) - c * chunk, 0), chunk)
                                           for c in numbers))
            assert counted.tolist() == held and counted.dtype == cu.dtype


def test_batch_of_a_rank(pool):
    pool.run(batch_of_rank, 2, 1)


def batch_of_rank(rank, group):
    padded = torch.tensor([0, 8, 12], dtype=torch.int32)
    ids = torch.arange(12)[None]
    found = te_cp.get_batch_on_this_cp_rank(padded, ids, ids + 50, ids + 100, cp_group=group)
    index = tex.thd_get_partitioned_indices(padded, 12, 2, rank)
    for got, x in zip(found, (ids, ids + 50, ids + 100)):
        assert torch.equal(got, x[:, index])
    # Sequences first, features last, one axis alone: the axis is as long as the sequences are.
    many, one = torch.arange(36).view(1, 12, 3), ids[0]
    found = te_cp.get_batch_on_this_cp_rank(padded, many, many[0], one, cp_group=group)
    for got, expected in zip(found, (many[:, index], many[0][index], one[index])):
        assert torch.equal(got, expected)
    with pytest.raises(ValueError, match=r"labels_padded.shape=\[1, 11\].*12 long"):
        te_cp.get_batch_on_this_cp_rank(padded, ids, ids[:, 1:], None, cp_group=group)


@pytest.mark.parametrize("packed", [True, False])
def test_parts_are_merged_in_place(packed):
    """A ring of TE's own functions: first all keys of one half, then others for second chunks."""
    import tessera.torch as tt
    torch.manual_seed(0)
    cu = torch.tensor([0, 8, 20], dtype=torch.int32)
    q, k, v = (torch.randn(20, 2, 8) for _ in range(3))
    k2, v2 = torch.randn(30, 2, 8), torch.randn(30, 2, 8)
    cu2 = torch.tensor([0, 10, 30], dtype=torch.int32)
    words = dict(layout="thd", return_lse=True)
    o, lse = tt.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **words)
    second = tex.thd_read_half_tensor(q, cu, 1)
    o2, lse2 = tt.attention(second, k2, v2, cu_seqlens_q=cu // 2, cu_seqlens_k=cu2, **words)

    def dense(x, ends):
        out = torch.full((2, 2, 12), -torch.inf)
        for n in range(2):
            out[n, :, :ends[n + 1] - ends[n]] = x[:, ends[n]:ends[n + 1]]
        return out
    total = lse.clone() if packed else dense(lse, cu)
    step = lse2 if packed else dense(lse2, cu // 2)
    before = lse if packed else dense(lse, cu)
    tex.thd_second_half_lse_correction(total, step, cu, packed)
    out = o.clone()
    tex.thd_out_correction(out, o2, before, total, step, cu, True, packed)
    nothing = torch.full_like(before, -torch.inf)
    tex.thd_out_correction(out, torch.full_like(o, 7), total, total, nothing, cu, False, packed)  # sees no key
    whole = torch.zeros_like(o)
    tex.thd_out_correction(whole, out, nothing, total, total, cu, False, packed)  # joins nothing
    assert torch.equal(whole, out)
    rows = [torch.arange(0, 8), torch.arange(8, 20)]
    for n, own in enumerate(rows):
        half = own[len(own) // 2:]
        keys = torch.cat([k[own], k2[cu2[n]:cu2[n + 1]]]), torch.cat([v[own], v2[cu2[n]:cu2[n + 1]]])
        want, want_lse = tt.attention(q[None, half], keys[0][None], keys[1][None], return_lse=True)
        torch.testing.assert_close(out[half], want[0])
        got = total[:, half] if packed else total[n, :, len(own) // 2:len(own)]
        torch.testing.assert_close(got, want_lse[0])
    read = tex.thd_read_second_half_lse(total, cu, packed, 11 if packed else 6)
    assert read.shape == ((2, 11) if packed else (2, 2, 6))
    if packed:  # TE's may be longer than what is packed
        assert read[:, 10:].eq(0).all()
        longer, exact = total.clone(), total.clone()
        tex.thd_second_half_lse_correction(longer, read, cu, True)
        tex.thd_second_half_lse_correction(exact, read[:, :10], cu, True)
        assert torch.equal(longer, exact)
    grad, step = torch.ones(20, 1, 1), torch.full((20, 1, 1), 2.0)
    tex.thd_grad_correction(grad, step, cu, "add", "copy")
    assert grad.flatten().tolist() == [3.0] * 4 + [2.0] * 4 + [3.0] * 6 + [2.0] * 6
    tex.thd_grad_correction(grad, step[:10], cu, "none", "add")
    assert grad.flatten().tolist() == [3.0] * 4 + [4.0] * 4 + [3.0] * 6 + [4.0] * 6
    tex.thd_grad_correction(grad, step[:10], cu, "zero", "copy")
    assert grad.flatten().tolist() == [0.0] * 4 + [2.0] * 4 + [0.0] * 6 + [2.0] * 6
