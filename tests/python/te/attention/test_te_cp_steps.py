# SPDX-License-Identifier: Apache-2.0
"""TE's ring out of its functions (cp_p2p_*, corrections), every rank in one process, and its exchanges over gloo."""

import pytest

torch = pytest.importorskip("torch")

import tessera.te.transformer_engine_torch as tex  # noqa: E402
import tessera.torch as tt  # noqa: E402
from cp_pool import Pool  # noqa: E402
from tessera.flash_attn import flash_attn_interface as fa  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention import context_parallel as te_cp  # noqa: E402
from tessera.te.pytorch.constants import CPLoadBalancingStrategy  # noqa: E402
from tessera.te.pytorch.cpp_extensions.fused_attn import FusedAttnBackend  # noqa: E402

pytestmark = pytest.mark.xdist_group("gloo")
SIZE, H, HK, D = 2, 4, 2, 8
BACKEND = FusedAttnBackend.F16_arbitrary_seqlen


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    pool = Pool(tmp_path_factory.mktemp("gloo"))
    yield pool
    pool.close()


class Case:
    """A problem, whole and as ranks hold it. Packed sequences of `lengths` lie in places of `padded` tokens."""

    def __init__(self, layout: str, lengths=None, padded=None):
        torch.manual_seed(2)
        self.layout, self.packed = layout, layout == "thd"
        shape = (sum(padded),) if self.packed else (2, 16) if layout == "bshd" else (16, 2)
        self.x = [torch.randn(*shape, h, D) for h in (H, HK, HK, H)]  # q, k, v, dout
        self.longest = max(padded) if self.packed else 16
        self.cu = self.padded = None
        if self.packed:
            self.cu, self.padded = (torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32)
                                    for x in (lengths, padded))
            valid = torch.cat([torch.arange(p) < n for n, p in zip(lengths, padded)])
            self.x = [torch.where(valid[:, None, None], x, 0) for x in self.x]

    def words(self):
        if not self.packed:
            return {"layout": self.layout, "causal": True}
        return {"layout": "thd", "causal": True, "align": "top_left", "cu_seqlens_q": self.cu, "cu_seqlens_k": self.cu,
                "cu_seqlens_q_padded": self.padded, "cu_seqlens_k_padded": self.padded}

    def of(self, x, rank):
        """A rank's rows, with its two chunks apart where the layout is dense."""
        if self.packed:
            return x[te_cp.get_thd_partitioned_indices(self.padded, len(x), SIZE, rank)]
        axis = self.layout.index("s")
        parts = x.unflatten(axis, (2 * SIZE, -1))
        return torch.stack([parts.select(axis, rank), parts.select(axis, 2 * SIZE - 1 - rank)], axis)

    def section(self, rank, step):
        return "diagonal" if step == 0 else "lower-triangle" if step <= rank else "upper-triangle"

    def prepared(self, rank, step, section):
        """A step's tensors and lengths."""
        source = (rank - step) % SIZE
        q, k, v = self.of(self.x[0], rank), self.of(self.x[1], source), self.of(self.x[2], source)
        own = None if self.padded is None else self.padded // SIZE
        return te_cp.cp_p2p_fwd_prepare_qkv(q, k, v, self.layout, self.packed, self.cu, self.cu, own, own, None, None,
                                            rank, step, SIZE, section), own


CASES = [("bshd", None, None), ("sbhd", None, None), ("thd", (5, 12, 0, 7), (8, 12, 4, 8))]


def ring(case, rank, kind):
    """(out, lse, for each step what backwards needs) of a rank, merged as TE's loop does."""
    out = lse = None
    steps = []
    mask = "padding_causal" if case.packed else "causal"
    for step in range(SIZE):
        section = case.section(rank, step)
        (q, k, v, cu_q, cu_k), own = case.prepared(rank, step, section)
        longest = case.longest // SIZE
        if kind == "fused":
            o, stats, rng, bias, peak = te_cp.cp_p2p_fwd_fused_attn(
                None, None, True, longest, longest, own, own, BACKEND, D ** -0.5, 0.0, "_".join([case.layout] * 3),
                case.layout, mask, "no_bias", False, None, None, None, None, q.dtype, None, None, None, rank, step,
                SIZE, False, q, k, v, cu_q, cu_k, section)
            assert bias is None and peak is None
            part = stats[..., 0].T if case.packed else stats[..., 0]
        else:
            function = fa._flash_attn_varlen_forward if case.packed else fa._flash_attn_forward
            o, part, rng = te_cp.cp_p2p_fwd_flash_attn(
                False, False, case.layout, dict(dropout_p=0.0, softmax_scale=D ** -0.5, softcap=0.0, alibi_slopes=None,
                                                return_softmax=False, window_size_left=-1, window_size_right=0),
                function, longest, longest, False, own, own, q, k, v, cu_q, cu_k, section)
        steps.append((section, cu_q, cu_k, rng))
        upper = section == "upper-triangle"
        if step == 0:
            out, lse = o.clone(), part.clone()
            continue
        old = lse.clone()
        if case.packed:
            if upper:
                tex.thd_second_half_lse_correction(lse, part, own, True)
            else:
                te_cp.flash_attn_fwd_softmax_lse_correction(lse, part)
            tex.thd_out_correction(out, o, old, lse, part, own, upper, True)
            continue
        axis = case.layout.index("s")
        if upper:
            te_cp.flash_attn_fwd_second_half_softmax_lse_correction(lse.unflatten(-1, (2, -1)), part)
            te_cp.flash_attn_fwd_incremental_second_half_out_correction(out.unflatten(axis, (2, -1)), o, old, lse,
                                                                        part, axis)
        else:
            te_cp.flash_attn_fwd_softmax_lse_correction(lse, part)
            te_cp.flash_attn_fwd_incremental_out_correction(out, o, old, lse, part, axis)
    return out, lse, steps


def backwards(case, rank, kind, out, lse, steps, add):
    """Calls add(which gradient, rank that holds the rows, section, rows) for every step of a rank."""
    dout, longest = case.of(case.x[3], rank), case.longest // SIZE
    sections, cus_q, cus_k, rngs = zip(*steps)
    split = out if case.packed else out.unflatten(case.layout.index("s"), (2, -1))
    for step in range(SIZE):
        at = SIZE - step - 1
        section, source = sections[at], (rank - at) % SIZE
        (q, k, v, _, _), own = case.prepared(rank, at, section)
        whole_q, whole_k, whole_v = case.of(case.x[0], rank), case.of(case.x[1], source), case.of(case.x[2], source)
        parts = te_cp.cp_p2p_bwd_prepare_qkv(whole_q, whole_k, whole_v, split, dout, case.layout, own, own, section)
        for mine, other in zip(parts, (q, k, v)):
            assert torch.equal(mine, other)
        second = tex.thd_read_second_half_lse(lse, own, True, len(parts[0])) if case.packed and \
            section == "upper-triangle" else None if case.packed else lse.unflatten(-1, (2, -1))[..., 1, :].contiguous()
        if kind == "fused":
            stats, stats_ = ((None if x is None else (x.T if case.packed else x)[..., None]) for x in (lse, second))
            *grads, dbias = te_cp.cp_p2p_bwd_fused_attn(
                False, None, None, None, None, None, stats, stats_, rngs, None, None, longest, longest, step, SIZE,
                cus_q, cus_k, own, own, BACKEND, D ** -0.5, 0.0, "_".join([case.layout] * 3), case.layout, case.layout,
                "_".join([case.layout] * 3), "padding_causal" if case.packed else "causal", "no_bias", False,
                q.dtype, q.dtype, None, None, None, None, None, *parts, section)
            assert dbias is None
        else:
            function = fa._flash_attn_varlen_backward if case.packed else fa._flash_attn_backward
            grads = te_cp.cp_p2p_bwd_flash_attn(
                False, False, case.layout, longest, longest, cus_q, cus_k, step, SIZE,
                dict(dropout_p=0.0, softmax_scale=D ** -0.5, softcap=0.0, alibi_slopes=None, deterministic=False),
                function, rngs, lse, second, False, own, own, *parts, section)
        add(0, rank, section == "upper-triangle" and 1, grads[0])
        for which in (1, 2):
            add(which, source, section == "lower-triangle" and "first", grads[which])


@pytest.mark.parametrize("kind, layout, lengths, padded", [
    *(("fused", *case) for case in CASES), ("flash", *CASES[0]), ("flash", "thd", (8, 12), (8, 12))])
def test_a_ring_of_tes_functions_is_one_attention(kind, layout, lengths, padded):
    case = Case(layout, lengths, padded)
    q, k, v, dout = case.x
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = tt.attention(*leaves, **case.words())
    wants = torch.autograd.grad(want, leaves, dout)
    totals = [[torch.zeros_like(case.of(x, rank)) for rank in range(SIZE)] for x in (q, k, v)]

    def add(which, rank, half, rows):
        target = totals[which][rank]
        if case.packed:
            cu = case.padded // SIZE
            words = ("none", "add") if half == 1 else ("add", "none") if half else ("add", "add")
            tex.thd_grad_correction(target, rows, cu, *words)
            return
        axis = layout.index("s")
        if half is False:
            target += rows.unflatten(axis, (2, -1))
        else:
            target.select(axis, 1 if half == 1 else 0).add_(rows)
    for rank in range(SIZE):
        out, lse, steps = ring(case, rank, kind)
        own = case.of(want.detach(), rank)
        torch.testing.assert_close(out if case.packed else out.view(own.shape), own)
        backwards(case, rank, kind, out, lse, steps, add)
    for which, full in enumerate(wants):
        for rank in range(SIZE):
            torch.testing.assert_close(totals[which][rank], case.of(full, rank), rtol=1e-4, atol=1e-5)


def test_biases_of_sections():
    """[b, h, sq, 2 cp, skv / 2 cp]: keys of the step's source, rows of the section."""
    torch.manual_seed(0)
    bias = torch.randn(1, H, 8, 16)
    rank, step = 0, 1
    q, k, v = (torch.randn(2, 8, h, D) for h in (H, HK, HK))
    full, split = bias.unflatten(-1, (4, 4)), bias.unflatten(-2, (2, 4)).unflatten(-1, (4, 4))
    for section, rows, keys in (("all", slice(None), [4, 5, 6, 7, 8, 9, 10, 11]),
                                ("lower-triangle", slice(None), [4, 5, 6, 7]),
                                ("upper-triangle", slice(4, 8), [4, 5, 6, 7, 8, 9, 10, 11])):
        q_, k_, v_ = q[:, rows], k[:, :len(keys)], v[:, :len(keys)]
        out, _, _, used, peak = te_cp.cp_p2p_fwd_fused_attn(
            full, split, True, 8, 8, None, None, BACKEND, 1.0, 0.0, "bshd_bshd_bshd", "bshd", "no_mask",
            "post_scale_bias", False, None, None, None, None, q.dtype, None, None, None, rank, step, 2, True, q_, k_,
            v_, None, None, section)
        expected = bias[:, :, rows][..., keys]
        assert torch.equal(used, expected)
        want, want_peak = tt.attention(q_, k_, v_, softmax_scale=1.0, bias=expected, return_max_logit=True)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(peak, want_peak)
    one_row = torch.randn(1, H, 1, 16).unflatten(-1, (4, 4))
    _, _, _, used, _ = te_cp.cp_p2p_fwd_fused_attn(
        one_row, one_row, True, 8, 8, None, None, BACKEND, 1.0, 0.0, "bshd_bshd_bshd", "bshd", "no_mask",
        "post_scale_bias", False, None, None, None, None, q.dtype, None, None, None, rank, step, 2, False, q[:, 4:], k,
        v, None, None, "upper-triangle")
    assert torch.equal(used, one_row[..., 1:3, :].flatten(-2))


def test_what_a_step_refuses():
    with pytest.raises(ValueError, match="section='middle': must be one of"):
        te_cp.cp_p2p_bwd_prepare_qkv(*[torch.zeros(1, 2, 2, 1, 8)] * 5, "bshd", None, None, "middle")
    nothing = [None] * 33
    nothing[14], nothing[-1] = True, "all"  # fp8, section
    with pytest.raises(tt.Refused, match="fp8=True.*pass 16-bit tensors"):
        te_cp.cp_p2p_fwd_fused_attn(*nothing)


def test_arguments_of_packages():
    given = dict(cu_seqlens_q=1, cu_seqlens_kv=2, max_seqlen_q=3, max_seqlen_kv=4, dq=5, dk=6, dv=7, seqused_q=8,
                 seqused_k=9)
    none = [None] * 9
    for forward, third, layout, expected in (
            (True, False, "thd", [1, 2, 3, 4]), (True, False, "bshd", []),
            (False, False, "thd", [5, 6, 7, 1, 2, 3, 4]), (False, False, "bshd", [5, 6, 7]),
            (True, True, "thd", [*none[:4], 1, 2, None, 8, 9, 3, 4, *none]), (True, True, "bshd", [*none, 3, 4, *none]),
            (False, True, "thd", [1, 2, 8, 9, 3, 4, 5, 6, 7]), (False, True, "bshd", [*none[:4], 3, 4, 5, 6, 7])):
        assert te_cp.get_fa_args(forward, third, layout, **given) == expected
    fourth = dict(cu_seqlens_q=1, cu_seqlens_k=2, seqused_q=8, seqused_k=9, max_seqlen_q=3, max_seqlen_k=4)
    assert te_cp.get_fa_args(True, False, "thd", **given, use_flash_attn_4=True) == fourth
    assert te_cp.get_fa_args(False, False, "bshd", **given, use_flash_attn_4=True) == dict(dq=5, dk=6, dv=7)


@pytest.mark.parametrize("window, causal", [(None, True), (None, False), ((5, 0), True), ((3, 2), False)])
def test_keys_of_a_chunk(window, causal):
    """The gathered keys, cut, with a window of which the diagonal ends in the corner, are the whole's rows."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 16, h, D) for h in (H, HK, HK))
    left, right = window or (-1, 0 if causal else -1)
    want = tt.attention(q, k, v, window=(left, right), causal=causal)
    for chunk in range(4):
        (first, end), (near, far) = te_cp.get_kv_seq_info_after_all_gather(chunk, 2, 4, 4, window, causal)
        out = tt.attention(q[:, 4 * chunk:4 * chunk + 4], k[:, first:end], v[:, first:end], window=(near, far),
                           align="bottom_right")
        torch.testing.assert_close(out, want[:, 4 * chunk:4 * chunk + 4])


def test_gathered_keys_come_into_order():
    cu = torch.tensor([0, 8, 12], dtype=torch.int32)
    x = torch.arange(12)
    by_rank = torch.cat([x[te_cp.get_thd_partitioned_indices(cu, 12, 2, rank)] for rank in (0, 1)])
    for strategy, stored in ((CPLoadBalancingStrategy.DUAL_CHUNK_SWAP, by_rank),
                             (CPLoadBalancingStrategy.NO_LOAD_BALANCE, x)):
        assert torch.equal(te_cp.restore_thd_gathered_kv(stored, cu, 2, strategy), x)
        assert torch.equal(te_cp.unrestore_thd_gathered_kv(x, cu, 2, strategy), stored)


# ---- exchanges ----

def exchanges(rank, group):
    torch.manual_seed(3)
    there, back = (getattr(te_cp, f"get_seq_chunk_ids_for_reordering_{when}_attn")(2, torch.empty(0).device)
                   for when in ("before", "after"))
    for layout, shape in (("bshd", (2, 8, H, D)), ("sbhd", (8, 2, H, D)), ("bhsd", (2, H, 8, D))):
        whole = [torch.randn(shape) for _ in range(3)]
        s, h = layout.index("s"), layout.index("h")
        own = [torch.cat([x.chunk(4, s)[rank], x.chunk(4, s)[3 - rank]], s) for x in whole]
        got = te_cp.flash_attn_a2a_communicate(list(own), there, s, 2, group, None, True, layout,
                                               a2a_input_names=["q", "k", "v"])
        for x, full in zip(got, whole):
            assert torch.equal(x, full.chunk(2, h)[rank])
        again = te_cp.flash_attn_a2a_communicate(got[0], back, s, 2, group, None, False, layout,
                                                 a2a_input_names=["out"])
        assert torch.equal(again, own[0].reshape(again.shape))
    cu = torch.tensor([0, 8, 12], dtype=torch.int32)
    whole = torch.randn(12, H, D)
    own = whole[te_cp.get_thd_partitioned_indices(cu, 12, 2, rank)]
    words = dict(qkv_format="thd", cu_seqlens_q_padded=cu, a2a_input_names=["out"])
    got = te_cp.flash_attn_a2a_communicate(own, None, 0, 2, group, None, True, **words)
    assert torch.equal(got, whole.chunk(2, 1)[rank])
    assert torch.equal(te_cp.flash_attn_a2a_communicate(got, None, 0, 2, group, None, False, **words), own)
    for bad, said in ((dict(words, cu_seqlens_q_padded=None), "cu_seqlens_q_padded=None: must be given for 'out'"),
                      (dict(words, a2a_input_names=None), "a2a_input_names=None: must name 1 tensors")):
        with pytest.raises(ValueError, match=said):
            te_cp.flash_attn_a2a_communicate(own, None, 0, 2, group, None, True, **bad)
    offset = torch.arange(4.0).view(1, 4, 1, 1)
    part = te_cp.flash_attn_a2a_communicate_softmax_offset(offset, 1, 2, group, None, True)
    assert part.flatten().tolist() == [2.0 * rank, 2.0 * rank + 1]
    assert torch.equal(te_cp.flash_attn_a2a_communicate_softmax_offset(part, 1, 2, group, None, False), offset)
    assert te_cp.flash_attn_a2a_communicate_softmax_offset(None, 1, 2, group, None, True) is None
    peers = torch.distributed.get_process_group_ranks(group)
    for batch in (False, True):
        received = torch.zeros(3)
        for request in te_cp.flash_attn_p2p_communicate(rank, torch.full((3,), rank + 1.0), peers[1 - rank], received,
                                                        peers[1 - rank], group, batch):
            request.wait()
        assert received.tolist() == [2.0 - rank] * 3


def test_exchanges(pool):
    pool.run(exchanges, 2, 1)
