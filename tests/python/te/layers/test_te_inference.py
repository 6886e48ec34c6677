# SPDX-License-Identifier: Apache-2.0
"""TE's caches and rotary embedding: random schedules against recomputation, angles against the formula."""

from collections import OrderedDict

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tessera.te.pytorch as te  # noqa: E402
import tessera.torch as tt  # noqa: E402
from tessera.te.pytorch.attention import dot_product_attention  # noqa: E402
from tessera.te.pytorch.attention.inference import (  # noqa: E402
    InferenceParams, KVCacheManager, NonPagedKVCacheManager, PagedKVCacheManager)
from tessera.te.pytorch.attention.rope import (  # noqa: E402
    FusedQKVRoPEFunc, FusedRoPEFunc, RotaryPositionEmbedding, apply_fused_qkv_rotary_pos_emb,
    apply_rotary_pos_emb)

pytestmark = pytest.mark.usefixtures("one_device")
H, G, D, LONGEST = 4, 2, 16, 48


class Model:
    """Two layers of attention over caches, and what each sequence has seen so far."""

    def __init__(self, qkv_format, mask, seed, window=None, **options):
        self.rng = np.random.default_rng(seed)
        self.format, self.mask, self.window = qkv_format, mask, window
        self.params = InferenceParams(5, LONGEST, G, D, torch.float32, qkv_format=qkv_format, **options)
        self.layers = [te.DotProductAttention(H, D, num_gqa_groups=G, qkv_format=qkv_format,
                                              attn_mask_type=mask, layer_number=number,
                                              window_size=window) for number in (1, 2)]
        for layer in self.layers:
            self.params.allocate_memory(layer.layer_number)
        self.seen = {1: {}, 2: {}}

    def step(self, plan: OrderedDict):
        """One step, each layer compared with attention over all that its sequences have seen."""
        self.params.pre_step(plan)
        for number, seen in self.seen.items():
            for id in [id for id in seen if id not in plan]:
                del seen[id]
            new = {id: self.draw(count) for id, count in plan.items()}
            for id, (_, k, v) in new.items():
                old = seen.get(id, (torch.empty(0, G, D), torch.empty(0, G, D)))
                seen[id] = torch.cat((old[0], k)), torch.cat((old[1], v))
            q, k, v = (self.laid_out([x[i] for x in new.values()]) for i in range(3))
            with torch.no_grad():
                out = self.layers[number - 1](q, k, v, inference_params=self.params)
            assert dot_product_attention._attention_backends["use_fused_attention"]
            for id, o in zip(plan, self.taken_apart(out, list(plan.values()))):
                k, v = seen[id]
                expected = tt.attention(
                    new[id][0][None], k[None], v[None], causal="causal" in self.mask,
                    window=None if self.window is None else self.window, align="bottom_right")[0]
                torch.testing.assert_close(o.unflatten(-1, (H, D)), expected, atol=2e-6, rtol=2e-5)

    def draw(self, count):
        return [torch.tensor(self.rng.standard_normal((count, heads, D)), dtype=torch.float32)
                for heads in (H, G, G)]

    def laid_out(self, parts):
        if self.format == "thd":
            return torch.cat(parts)
        s = max(map(len, parts))
        x = torch.full((len(parts), s, *parts[0].shape[1:]), torch.nan)
        for row, part in zip(x, parts):
            row[:len(part)] = part
        return x if self.format == "bshd" else x.transpose(0, 1)

    def taken_apart(self, out, counts):
        if self.format == "thd":
            return out.split(counts)
        rows = out if self.format == "bshd" else out.transpose(0, 1)
        return [row[:count] for row, count in zip(rows, counts)]


OPTIONS = {"rows": {}, "pages": {"is_paged": True, "page_size": 8},
           "few pages": {"is_paged": True, "page_size": 4, "total_num_pages": 40}}


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mask, window", [("padding_causal", None), ("padding", None),
                                          ("padding_causal", (7, 0))])
def test_random_schedules(qkv_format, options, mask, window):
    """Sequences join with a prompt, go on by a token or a few, leave, and change their order."""
    model = Model(qkv_format, mask, 3, window, **OPTIONS[options])
    rng, next_id = np.random.default_rng(7), 0
    for _ in range(12):
        alive = [id for id, length in model.params.sequences.items()
                 if length < LONGEST - 6 and rng.random() < 0.85]
        rng.shuffle(alive)
        plan = OrderedDict((id, int(rng.integers(1, 4))) for id in alive)
        while len(plan) < 5 and rng.random() < 0.6:
            plan[next_id] = int(rng.integers(1, 14))
            next_id += 1
        if plan:
            model.step(plan)


def test_nothing_changes_without_room():
    model = Model("bshd", "padding_causal", 0, is_paged=True, page_size=4, total_num_pages=4)
    model.step(OrderedDict([(7, 9), (8, 2)]))
    params = model.params
    before = (dict(params.sequences), params.cu_seqlens_q.clone(), params.cache_manager.page_table.clone(),
              list(params.cache_manager._free))
    for plan, text in (({7: 4, 8: 4}, r"sequences \[7, 8\] need 2 pages of 4 tokens: 0 are free"),
                       ({7: 40}, "sequence 7 comes to 49 tokens"),
                       ({7: -1}, r"step_dict\[7\]=-1"),
                       ({id: 1 for id in range(6)}, "6 sequences: must be at most max_batch_size=5")):
        with pytest.raises(ValueError, match=text):
            params.pre_step(OrderedDict(plan))
    assert before[0] == dict(params.sequences) and before[3] == params.cache_manager._free
    assert torch.equal(before[1], params.cu_seqlens_q)
    assert torch.equal(before[2], params.cache_manager.page_table)
    model.step(OrderedDict([(7, 3)]))
    params.reset()
    model.seen = {1: {}, 2: {}}
    model.step(OrderedDict([(9, 16)]))


@pytest.mark.parametrize("is_paged", [False, True])
def test_step_as_te_returns_it(is_paged):
    params = InferenceParams(3, 16, G, D, torch.bfloat16, is_paged=is_paged,
                             page_size=4 if is_paged else None, head_dim_v=8)
    params.allocate_memory(1)
    params.pre_step(OrderedDict([(0, 3), (1, 1)]))
    k, v = torch.randn(2, 3, G, D).bfloat16(), torch.randn(2, 3, G, 8).bfloat16()
    k_cache, v_cache, cu_q, cu_kv, longest, qkv_format = params.step(1, k, v, "bshd")
    assert (longest, qkv_format) == (16, "bshd") and params.step(1, k, v, "sbhd".replace("sbhd", "bshd"))
    assert cu_q.tolist() == cu_kv.tolist() == [0, 3, 4, 4]
    if is_paged:
        assert k_cache.shape == (12, 4, G, D) and v_cache.shape == (12, 4, G, 8)
        k_cache, v_cache = params.convert_paged_to_nonpaged(1)
    assert k_cache.shape == (2, 16, G, D) and v_cache.shape == (2, 16, G, 8)
    assert torch.equal(k_cache[0, :3], k[0]) and torch.equal(v_cache[1, :1], v[1, :1])
    params.pre_step(OrderedDict([(1, 1), (0, 2)]))  # the other order
    assert params.get_seqlens_pre_step().tolist() == [1, 3]
    assert list(params.sequences.items()) == [(1, 2), (0, 5)]
    if not is_paged:
        k_cache, *_ = params.step(1, k[:, :2], v[:, :2], "bshd")
        assert torch.equal(k_cache[0, 1], k[0, 0]) and torch.equal(k_cache[1, 3:5], k[1, :2])


def test_an_fp8_cache():
    params = InferenceParams(2, 16, G, D, torch.float8_e4m3fn)
    layer = te.DotProductAttention(H, D, num_gqa_groups=G, qkv_format="bshd", layer_number=1,
                                   attn_mask_type="padding_causal")
    params.allocate_memory(1)
    params.pre_step(OrderedDict([(0, 5), (1, 5)]))
    q, k, v = (torch.randn(2, 5, heads, D).bfloat16() for heads in (H, G, G))
    with torch.no_grad():
        out = layer(q, k, v, inference_params=params)
    k8, v8 = (x.to(torch.float8_e4m3fn).to(torch.bfloat16) for x in (k, v))
    expected = tt.attention(q, k8, v8, causal=True)
    torch.testing.assert_close(out.unflatten(-1, (H, D)), expected, atol=2e-2, rtol=2e-2)


def test_a_manager_of_ones_own():
    class Doubling(NonPagedKVCacheManager):
        def append(self, layer_number, new_k, new_v, *more):
            return super().append(layer_number, 2 * new_k, new_v, *more)

    params = InferenceParams(1, 8, G, D, torch.float32, custom_cache_manager=Doubling)
    params.allocate_memory(1)
    params.pre_step(OrderedDict([(0, 2)]))
    k = torch.randn(1, 2, G, D)
    assert torch.equal(params.step(1, k, k, "bshd")[0][0, :2], 2 * k[0])
    assert issubclass(PagedKVCacheManager, KVCacheManager)


@pytest.mark.parametrize("is_paged", [False, True])
def test_a_manager_of_te(is_paged):
    """One that has TE's four methods and returns two values, as later versions of TE do."""
    base = PagedKVCacheManager if is_paged else NonPagedKVCacheManager

    class Wrapping:
        def __init__(self, **sizes):
            self.inner = base(**sizes)
            self.cache, self.reset, self.pre_step = self.inner.cache, self.inner.reset, self.inner.pre_step
            self.allocate_memory, self.page_table = self.inner.allocate_memory, self.inner.page_table

        def step(self, *given):
            return self.inner.step(*given)[:2]

    params = InferenceParams(2, 16, G, D, torch.float32, is_paged=is_paged, page_size=4 if is_paged else None,
                             custom_cache_manager=Wrapping)
    layer = te.DotProductAttention(H, D, num_gqa_groups=G, qkv_format="bshd", layer_number=1)
    params.allocate_memory(1)
    params.pre_step(OrderedDict([(3, 5), (4, 5)]))
    q, k, v = (torch.randn(2, 5, heads, D) for heads in (H, G, G))
    out = layer(q, k, v, attn_mask_type="padding_causal", inference_params=params)
    torch.testing.assert_close(out.unflatten(-1, (H, D)), tt.attention(q, k, v, causal=True))


def test_bad_calls():
    params = InferenceParams(2, 16, G, D, torch.float32)
    layer = te.DotProductAttention(H, D, num_gqa_groups=G, qkv_format="bshd", layer_number=3)
    q, k = torch.randn(1, 2, H, D), torch.randn(1, 2, G, D)
    with pytest.raises(ValueError, match="attn_mask_type='causal': must be a padding mask"):
        layer(q, k, k, inference_params=params)
    params.pre_step(OrderedDict([(0, 2)]))
    with pytest.raises(ValueError, match="layer_number=3: has no cache"), torch.no_grad():
        layer(q, k, k, attn_mask_type="padding", inference_params=params)
    with pytest.raises(ValueError, match="page_size=5: must divide max_sequence_length=16"):
        InferenceParams(2, 16, G, D, torch.float32, is_paged=True, page_size=5)


def test_a_cache_has_no_gradient():
    """q keeps its own, as with TE: keys and values are what the cache holds."""
    params = InferenceParams(2, 16, G, D, torch.float32, qkv_format="bshd")
    layer = te.DotProductAttention(H, D, num_gqa_groups=G, qkv_format="bshd", layer_number=1,
                                   attn_mask_type="padding_causal")
    params.allocate_memory(1)
    params.pre_step(OrderedDict([(0, 5), (1, 5)]))
    q, k, v = (torch.randn(2, 5, heads, D, requires_grad=True) for heads in (H, G, G))
    out = layer(q, k, v, inference_params=params)
    expected = tt.attention(q, k.detach(), v.detach(), causal=True).flatten(-2)
    torch.testing.assert_close(out, expected)
    got, wanted = (torch.autograd.grad(o.square().sum(), q)[0] for o in (out, expected))
    torch.testing.assert_close(got, wanted)
    assert not any(x.requires_grad for x in params.cache_manager.cache[1])
    params.pre_step(OrderedDict([(0, 1), (1, 1)]))
    again = layer(*(x[:, :1] for x in (q, k, v)), inference_params=params)
    with pytest.raises(RuntimeError, match="does not require grad|not have been used"):
        torch.autograd.grad(again.sum(), k)


def test_pages_as_te_counts_them(caplog):
    params = InferenceParams(3, 16, G, D, torch.float32, is_paged=True, page_size=4, total_num_pages=6)
    manager = params.cache_manager
    params.pre_step(OrderedDict([(7, 9), (8, 2)]))
    assert manager.get_sequence_count() == 2 and manager.get_sequence_lengths() == [9, 2]
    assert [manager.get_page_count(id) for id in (7, 8, 9)] == [3, 1, 0]
    pages = manager.get_page_list(7) + manager.get_page_list(8)
    free = [page.page_id for page in manager.free_pages]
    assert sorted(pages + free) == list(range(6)) and manager.has_free_page()
    assert [page.page_id for page in manager.allocated_pages[7]] == manager.get_page_list(7)
    assert all(page.allocated for page in manager.allocated_pages[7])
    table = manager.get_page_table([8, 7])
    assert table.shape == (3, 4) and table.dtype == torch.int32 and table is manager.page_table
    assert table[0].tolist() == manager.get_page_list(8) + [0] * 3
    assert table[1].tolist() == manager.get_page_list(7) + [0]
    with caplog.at_level("DEBUG", "PagedKVCacheManager"):
        manager.print_cache()
    assert "used 4, free 2" in caplog.text and "seq_id 7, num_tokens 9, num_pages 3" in caplog.text
    manager.allocate_page(8)
    manager.allocate_sequence(9, 3)
    assert not manager.has_free_page() and manager.get_page_count(8) == 2
    with pytest.raises(RuntimeError, match="0 of 6 pages are free"):
        manager.allocate_page(8)
    manager.deallocate_sequence(7)
    assert len(manager.free_pages) == 3 and 7 not in manager.allocated_pages
    params.reset()
    assert len(manager.free_pages) == 6 and not manager.page_table.any()


# ---- rotary embedding ----

def formula(t, angles, interleaved):
    """t fp64 [s, b, h, d], angles [s, b, r/2]."""
    r = 2 * angles.shape[-1]
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
    first, second = (slice(0, r, 2), slice(1, r, 2)) if interleaved else (slice(r // 2), slice(r // 2, r))
    out = t.clone()
    a, b = t[..., first], t[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("start", [None, [3, 20]])
def test_apply(tensor_format, interleaved, percent, start):
    s, b, h, d = 7, 2, 3, 16
    freqs = RotaryPositionEmbedding(d, percent, interleaved=interleaved)(32)
    assert freqs.shape == (32, 1, 1, d * percent) and freqs.dtype == torch.float32
    # GPUs turn fp32 at most.
    t = torch.randn(s, b, h, d, dtype=torch.float64 if torch.get_default_device().type == "cpu" else torch.float32)
    positions = torch.arange(s)[:, None] + torch.tensor(start or [0, 0])
    inv_freq = 10000.0 ** -(torch.arange(0, d * percent, 2, dtype=torch.float64) / (d * percent))
    expected = formula(t, positions[..., None] * inv_freq, interleaved)
    given = {"start_positions": None if start is None else torch.tensor(start, dtype=torch.int32)}
    x, y = (t, expected) if tensor_format == "sbhd" else (t.transpose(0, 1), expected.transpose(0, 1))
    if tensor_format == "thd":
        x, y = x.flatten(0, 1), y.flatten(0, 1)
        given["cu_seqlens"] = torch.tensor([0, s, 2 * s], dtype=torch.int32)
    x = x.contiguous().requires_grad_()
    for fused in (False, True):
        out = apply_rotary_pos_emb(x, freqs, tensor_format, interleaved=interleaved, fused=fused, **given)
        torch.testing.assert_close(out, y.contiguous().to(out.dtype), atol=5e-6, rtol=0)
    out.square().sum().backward()  # a turn keeps lengths
    torch.testing.assert_close(x.grad, 2 * x.detach(), atol=5e-6, rtol=0)
    again = FusedRoPEFunc.apply(x, freqs, given["start_positions"], tensor_format, interleaved,
                                given.get("cu_seqlens"))
    assert torch.equal(out, again)


@pytest.mark.parametrize("tensor_format", ["bshd", "thd"])
def test_two_chunks_of_each_rank(tensor_format):
    cp, lengths, d = 2, [8, 16], 8
    freqs = RotaryPositionEmbedding(d)(16)
    for length in lengths:
        t = torch.randn(1, length, 2, d)
        whole = apply_rotary_pos_emb(t, freqs, "bshd")
        chunks = t.chunk(2 * cp, 1), whole.chunk(2 * cp, 1)
        for rank in range(cp):
            local, expected = (torch.cat((c[rank], c[2 * cp - 1 - rank]), 1) for c in chunks)
            cu_seqlens = None
            if tensor_format == "thd":
                local, expected = local[0], expected[0]
                cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
            out = apply_rotary_pos_emb(local, freqs, tensor_format, cu_seqlens=cu_seqlens, cp_size=cp,
                                       cp_rank=rank)
            torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
def test_fused_qkv(tensor_format):
    d, groups, per_group = 8, 2, 3
    freqs = RotaryPositionEmbedding(d)(20)
    qkv = torch.randn(5, 5, groups, (per_group + 2) * d, requires_grad=True)
    split, start = [per_group * d, d, d], torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32)
    q, k, v = apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, split, tensor_format, start)
    assert q.shape == (5, 5, groups * per_group, d) and k.shape == v.shape == (5, 5, groups, d)
    heads = qkv.unflatten(-1, (-1, d))
    options = dict(tensor_format=tensor_format, start_positions=start)
    assert torch.equal(q, apply_rotary_pos_emb(heads[:, :, :, :per_group].flatten(2, 3), freqs, **options))
    assert torch.equal(k, apply_rotary_pos_emb(heads[:, :, :, per_group], freqs, **options))
    assert torch.equal(v, heads[:, :, :, -1])
    (q.square().sum() + k.square().sum() + v.square().sum()).backward()
    torch.testing.assert_close(qkv.grad, 2 * qkv.detach())
    assert torch.equal(q, FusedQKVRoPEFunc.apply(qkv, freqs, freqs, split, start, tensor_format)[0])
    with pytest.raises(ValueError, match=r"qkv_split_arg_list=\[8, 8\]"):
        apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [8, 8], tensor_format)


def test_stretched_positions():
    plain, stretched = RotaryPositionEmbedding(8), RotaryPositionEmbedding(8, 1.0, 4, 16)
    torch.testing.assert_close(stretched(32), plain(32) / 4)
    torch.testing.assert_close(stretched(128), plain(128) / 8)  # past 4 · 16 by as much as it exceeds 16
    torch.testing.assert_close(plain(4, offset=3), plain(7)[3:])


def test_bad_rotations():
    freqs = RotaryPositionEmbedding(8)(4)
    t = torch.randn(2, 5, 1, 8)
    wrong = [({"tensor_format": "bhsd"}, "tensor_format='bhsd'"), ({"tensor_format": "thd"}, "cu_seqlens=None"),
             ({"cp_size": 2, "cp_rank": 2}, "cp_rank=2")]
    if t.device.type == "cpu":  # elsewhere positions are not read on the host
        wrong += [({"tensor_format": "bshd"}, "row 4 of sequence 0 is at 4"),
                  ({"tensor_format": "bshd", "interleaved": True}, "interleaved=True: freqs turns the elements")]
    for given, text in wrong:
        with pytest.raises(ValueError, match=text):
            apply_rotary_pos_emb(t, freqs, **given)
    with pytest.raises(ValueError, match="must end with an even number"):
        apply_rotary_pos_emb(t, freqs[..., :5], "bshd")
    with pytest.raises(ValueError, match="dim=7"):
        RotaryPositionEmbedding(7)


def test_packed_qkv_is_turned():
    cu_seqlens = torch.tensor([0, 3, 9], dtype=torch.int32)
    freqs, start = RotaryPositionEmbedding(D)(16), torch.tensor([2, 5])
    qkv = torch.randn(9, G, 4 * D)  # two heads of q, one of k and one of v in each group
    q, k, v = apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [2 * D, D, D], "thd", start, False, cu_seqlens)
    heads = qkv.unflatten(-1, (4, D))
    turned = [apply_rotary_pos_emb(x, freqs, "thd", start, cu_seqlens=cu_seqlens)
              for x in (heads[:, :, :2].flatten(1, 2), heads[:, :, 2])]
    assert torch.equal(q, turned[0]) and torch.equal(k, turned[1]) and torch.equal(v, heads[:, :, 3])
    assert all(map(torch.equal, FusedQKVRoPEFunc.apply(qkv, freqs, freqs, [2 * D, D, D], start, "thd", False,
                                                       cu_seqlens), (q, k, v)))
    with pytest.raises(ValueError, match="cu_seqlens=None"):
        apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [2 * D, D, D], "thd")


@pytest.mark.parametrize("is_paged", [False, True])
def test_decoding_compiles_without_a_break(is_paged):
    """Step by step through one compiled layer gives what the eager one gives."""
    torch._dynamo.reset()
    layers = [te.DotProductAttention(H, D, num_gqa_groups=G, qkv_format="bshd", layer_number=1,
                                     attn_mask_type="padding_causal") for _ in range(2)]
    run = torch.compile(layers[0], fullgraph=True, backend="aot_eager"), layers[1]
    caches = [InferenceParams(2, 16, G, D, torch.float32, is_paged=is_paged, page_size=4 if is_paged else None)
              for _ in range(2)]
    for cache in caches:
        cache.allocate_memory(1)
    for count in (3, 1, 1, 1):
        q, k, v = (torch.randn(2, count, heads, D) for heads in (H, G, G))
        outs = []
        for layer, cache in zip(run, caches):
            cache.pre_step(OrderedDict([(0, count), (1, count)]))
            with torch.no_grad():
                outs.append(layer(q, k, v, inference_params=cache))
        torch.testing.assert_close(*outs)


def test_without_kernels(monkeypatch):
    """UnfusedDotProductAttention gathers the pages."""
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    params = InferenceParams(2, 16, G, D, torch.float32, is_paged=True, page_size=4)
    layer = te.DotProductAttention(H, D, num_gqa_groups=G, qkv_format="bshd", layer_number=1)
    params.allocate_memory(1)
    params.pre_step(OrderedDict([(0, 5), (1, 5)]))
    q, k, v = (torch.randn(2, 5, heads, D) for heads in (H, G, G))
    dot_product_attention._attention_backends["backend_selection_requires_update"] = True
    with torch.no_grad():
        out = layer(q, k, v, attn_mask_type="padding_causal", inference_params=params)
    assert dot_product_attention._attention_backends["use_unfused_attention"]
    torch.testing.assert_close(out.unflatten(-1, (H, D)), tt.attention(q, k, v, causal=True))
