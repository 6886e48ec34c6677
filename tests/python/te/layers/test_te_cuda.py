# SPDX-License-Identifier: Apache-2.0
"""tessera.te on a CUDA device: graphs of layers that decode over a cache, and that train."""
from collections import OrderedDict

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
import tessera.te.pytorch as te  # noqa: E402
from tessera.te.pytorch.attention.inference import InferenceParams  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not any(x.startswith("cuda") for x in tessera.backends()),
    reason="needs a CUDA device and a build for it")


def test_te_graphs_of_a_cache():
    """A layer in evaluation, which allocates its cache and has no backward graph, step by step, the last with a
    sequence fewer than were captured, and rotary embedding from where each sequence is; one in training, whose
    gradients add up over two passes and which is eager again after reset()."""
    layers = [te.TransformerLayer(256, 512, 4, hidden_dropout=0.0, attention_dropout=0.0, layer_number=n + 1,
                                  self_attn_mask_type="padding_causal", attn_input_format="bshd",
                                  params_dtype=torch.bfloat16).eval() for n in range(2)]
    caches = [InferenceParams(2, 64, 4, 64, torch.bfloat16, max_ctx_len=8) for _ in range(2)]
    x = torch.randn(2, 8, 256, device="cuda", dtype=torch.bfloat16)
    caches[1].pre_step(OrderedDict([(0, 8), (1, 8)]))
    eager = [layer.forward for layer in layers]
    freqs = te.RotaryPositionEmbedding(64)(64).cuda()
    graphed = [te.make_graphed_callables(layer, (x,), sample_kwargs={"inference_params": caches[1],
                                                                     "rotary_pos_emb": freqs})
               for layer in layers]
    caches[1].reset()
    for counts in ((8, 3), (1, 1), (1, 2), (3,)):
        for cache in caches:
            cache.pre_step(OrderedDict(enumerate(counts)))
        expected = out = torch.randn_like(x)
        for one, layer in zip(eager, graphed):
            expected, out = (each(y, inference_params=kept, rotary_pos_emb=freqs)
                             for each, y, kept in ((one, expected, caches[0]), (layer, out, caches[1])))
        for row, count in enumerate(counts):
            torch.testing.assert_close(out[row, :count], expected[row, :count])
    del expected, out  # their graphs keep the parameters' gradients on this stream, which a capture may not join
    layer = layers[0].train()
    layer.reset()
    kwargs = {"self_attn_mask_type": "causal"}
    wanted = [sum(g) for g in zip(*(torch.autograd.grad(layer(y, **kwargs).float().sum(), layer.parameters())
                                    for y in (x, 2 * x)))]
    te.make_graphed_callables(layer, (x,), sample_kwargs=kwargs)
    for y in (x, 2 * x):
        layer(y, **kwargs).float().sum().backward()
    for p, grad in zip(layer.parameters(), wanted):
        torch.testing.assert_close(p.grad, grad, rtol=2e-2, atol=2e-2)
