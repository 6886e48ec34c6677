# SPDX-License-Identifier: Apache-2.0
"""A server's loop over TE's names, as TE's own test of its caches has it: requests arrive, join the batch with a
context, go on by a token a step and leave; what each step gives is what whole sequences give."""
import dataclasses
from collections import OrderedDict

import pytest

torch = pytest.importorskip("torch")

import tessera.te.pytorch as te  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention import _attention_backends  # noqa: E402
from tessera.te.pytorch.attention.dot_product_attention.utils import (  # noqa: E402
    AttentionParams, check_set_window_size, get_attention_backend)
from tessera.te.pytorch.utils import init_method_normal, scaled_init_method_normal  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_device")
H, G, D, HIDDEN = 4, 2, 16, 64
MOST, CONTEXT, LONGEST = 3, 6, 16  # sequences in a batch, tokens of a context, tokens of a sequence
BACKENDS = ("FlashAttention", "FusedAttention", "UnfusedAttention")


@dataclasses.dataclass
class Request:
    arrival: int
    context: int
    generated: int
    seen: int = 0


def requests():
    return {id: Request(*numbers) for id, numbers in enumerate(
        ((0, 5, 4), (0, 2, 2), (1, 6, 6), (1, 1, 1), (2, 3, 5), (6, 4, 3), (30, 6, 2)))}


def steps():
    """{id: new tokens} of each step in which there are sequences, and how many tokens they have with these."""
    waiting, batch, t = requests(), OrderedDict(), 0
    while waiting or batch:
        for id in [id for id, request in batch.items() if request.seen == request.context + request.generated]:
            del batch[id]
        for id in [id for id, request in waiting.items() if request.arrival <= t][:MOST - len(batch)]:
            batch[id] = waiting.pop(id)
        t += 1
        if batch:
            new = OrderedDict((id, 1 if request.seen else request.context) for id, request in batch.items())
            for id, count in new.items():
                batch[id].seen += count
            yield new, {id: request.seen for id, request in batch.items()}


def model(module, qkv_format, mask):
    torch.manual_seed(5)
    if module == "DotProductAttention":
        return [te.DotProductAttention(num_attention_heads=H, kv_channels=D, num_gqa_groups=G, layer_number=1,
                                       attention_dropout=0.0, qkv_format=qkv_format, attn_mask_type=mask).eval()]
    return [te.TransformerLayer(
        hidden_size=HIDDEN, ffn_hidden_size=4 * HIDDEN, num_attention_heads=H, num_gqa_groups=G, hidden_dropout=0.0,
        attention_dropout=0.0, init_method=init_method_normal(0.1),
        output_layer_init_method=scaled_init_method_normal(0.1, 2), layer_number=number, kv_channels=D,
        self_attn_mask_type=mask, fuse_qkv_params=False, params_dtype=torch.float32,
        attn_input_format=qkv_format).eval() for number in (1, 2)]


def run(layers, tensors, **words):
    """Each layer's output is the next one's input. Layers that have projections turn q and k."""
    if isinstance(layers[0], te.TransformerLayer):
        words["rotary_pos_emb"] = te.RotaryPositionEmbedding(D)(2 * LONGEST)
    for layer in layers:
        tensors = [layer(*tensors, **words)]
    return tensors[0]


def laid_out(x, new, seen, qkv_format, graphed):
    """The new tokens of x [requests, s, ...] as a step has them. A graph has room for the longest step: MOST rows of
    CONTEXT tokens, whatever there is."""
    parts = [x[id, seen[id] - count:seen[id]] for id, count in new.items()]
    if qkv_format == "thd":
        packed = torch.cat(parts)
        more = MOST * CONTEXT - len(packed) if graphed else 0
        return torch.cat([packed, packed.new_full((more, *packed.shape[1:]), 7.0)])
    rows, s = (MOST, CONTEXT) if graphed else (len(parts), max(new.values()))
    padded = x.new_full((rows, s, *x.shape[2:]), 7.0)
    for row, part in zip(padded, parts):
        row[:len(part)] = part
    return padded.transpose(0, 1).contiguous() if qkv_format == "sbhd" else padded


def cache(qkv_format, page_size=None):
    pages = {} if page_size is None else dict(is_paged=True, page_size=page_size,
                                              total_num_pages=MOST * LONGEST // page_size)
    return te.InferenceParams(max_batch_size=MOST, max_sequence_length=LONGEST, num_heads_kv=G, head_dim_k=D,
                              head_dim_v=D, dtype=torch.float32, max_ctx_len=CONTEXT, qkv_format=qkv_format, **pages)


@pytest.fixture
def backend(request, monkeypatch):
    for name, variable in zip(BACKENDS, ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")):
        monkeypatch.setenv(variable, str(int(name == request.param)))
    _attention_backends["backend_selection_requires_update"] = True
    yield request.param
    _attention_backends["backend_selection_requires_update"] = True


@pytest.mark.parametrize("graphed", [False, True], ids=["own shapes", "graph's shapes"])
@pytest.mark.parametrize("module", ["DotProductAttention", "TransformerLayer"])
@pytest.mark.parametrize("backend, page_size", [
    *((backend, page_size) for backend in BACKENDS for page_size in (None, 1)), ("FlashAttention", LONGEST)],
    indirect=["backend"])  # TE asks flash-attn 2 for large pages
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "thd"])
@torch.no_grad()
def test_a_server(qkv_format, page_size, module, graphed, backend):
    params = cache(qkv_format, page_size)
    offered = get_attention_backend(AttentionParams(
        qkv_dtype=torch.float32, qkv_layout=("" if page_size is None else "paged_kv_") + f"{qkv_format}_bshd_bshd",
        batch_size=MOST, num_heads=H, num_gqa_groups=G, max_seqlen_q=LONGEST, max_seqlen_kv=LONGEST, head_dim_qk=D,
        head_dim_v=D, attn_mask_type="padding_causal", window_size=check_set_window_size("padding_causal", (-1, 0)),
        pad_between_seqs=False, attention_dropout=0.0, is_training=False, inference_params=params))[-1]
    assert offered == [name == backend for name in BACKENDS]
    if module == "DotProductAttention":
        params.allocate_memory(1)  # layers allocate by themselves
    heads = [(H, D), (G, D), (G, D)] if module == "DotProductAttention" else [(HIDDEN,)]
    inputs = [torch.randn(len(requests()), LONGEST, *each) for each in heads]
    whole = run(model(module, "bshd", "causal"), inputs)
    layers = model(module, qkv_format, "padding_causal")
    if graphed:  # a graph's warm-up fills the batch, which the loop then forgets
        params.pre_step(OrderedDict((id, CONTEXT) for id in range(MOST)))
        cu = torch.arange(MOST + 1, dtype=torch.int32) * CONTEXT
        shape = {"bshd": (MOST, CONTEXT), "sbhd": (CONTEXT, MOST), "thd": (MOST * CONTEXT,)}[qkv_format]
        run(layers, [torch.ones(*shape, *each) for each in heads], cu_seqlens_q=cu, cu_seqlens_kv=cu,
            inference_params=params, max_seqlen_q=CONTEXT, max_seqlen_kv=LONGEST)
        params.reset()
    served = set()
    for new, seen in steps():
        rows = MOST if graphed else len(new)
        cu = torch.zeros(rows + 1, dtype=torch.int32)
        cu[1:len(new) + 1] = torch.tensor(list(new.values())).cumsum(0)
        params.pre_step(new)
        if params.is_paged:
            params.cache_manager.print_cache()
        out = run(layers, [laid_out(x, new, seen, qkv_format, graphed) for x in inputs], cu_seqlens_q=cu,
                  cu_seqlens_kv=cu.clone(), inference_params=params,
                  max_seqlen_q=CONTEXT if graphed else max(new.values()), max_seqlen_kv=LONGEST)
        for i, (id, count) in enumerate(new.items()):
            last = {"bshd": lambda: out[i, count - 1], "sbhd": lambda: out[count - 1, i],
                    "thd": lambda: out[cu[i + 1] - 1]}[qkv_format]()
            torch.testing.assert_close(last, whole[id, seen[id] - 1], rtol=1e-4, atol=1e-5)
            served.add(id)
    assert served == set(requests())


@pytest.mark.parametrize("page_size", [None, 4])
def test_rows_beyond_the_batch_change_nothing(page_size):
    """They have no tokens: what lies in their places goes nowhere, and a row too many is an error."""
    params, layer = cache("bshd", page_size), model("DotProductAttention", "bshd", "padding_causal")[0]
    params.allocate_memory(1)
    params.pre_step(OrderedDict([(7, 3), (8, 4)]))
    q, k, v = (torch.full((MOST, CONTEXT, heads, D), torch.nan) for heads in (H, G, G))
    for x in (q, k, v):
        x[0, :3], x[1, :4] = torch.randn(3, *x.shape[2:]), torch.randn(4, *x.shape[2:])
    assert params.rows(q, "bshd") == MOST and params.rows(q.flatten(0, 1), "thd") == 2
    assert params.starts(MOST).tolist() == [0, 0, 0] and params.get_seqlens_pre_step().tolist() == [0, 0]
    with torch.no_grad():
        out = layer(q, k, v, inference_params=params)
    assert not any(pool.isnan().any() for pool in params.cache_manager.cache[1])
    assert out.shape == (MOST, CONTEXT, H * D) and not out[0, :3].isnan().any() and not out[1, :4].isnan().any()
    params.pre_step(OrderedDict([(8, 1)]))
    assert params.starts(2).tolist() == [4, 0]
    with pytest.raises(ValueError, match=r"k.shape=\[4, 6, 2, 16\]"):
        layer(*(torch.zeros(MOST + 1, CONTEXT, heads, D) for heads in (H, G, G)), inference_params=params)
    with pytest.raises(ValueError, match=r"k.shape=\[1, 6, 2, 16\]"):
        params.pre_step(OrderedDict([(8, 1), (9, 1)]))
        layer(*(torch.zeros(1, CONTEXT, heads, D) for heads in (H, G, G)), inference_params=params)
