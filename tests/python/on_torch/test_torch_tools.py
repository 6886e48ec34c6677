# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's tools see of tessera's operators: meta tensors, the counter of operations, torch.export,
AOTInductor."""
import shutil

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import tessera.torch as tt  # noqa: E402
from dropins import close, normal  # noqa: E402

CU_Q, CU_K = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 8], [0, 4, 5]))


def test_meta_tensors_have_shapes_and_errors():
    q, k, v = (torch.empty(2, s, h, d, device="meta", requires_grad=True)
               for s, h, d in ((5, 4, 8), (7, 2, 8), (7, 2, 6)))
    o, lse = tt.attention(q, k, v, causal=True, align="top_left", return_lse=True)
    assert o.is_meta and o.shape == (2, 5, 4, 6) and lse.shape == (2, 4, 5)
    assert [g.shape for g in torch.autograd.grad(o.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]
    with pytest.raises(ValueError, match="k.shape"):
        tt.attention(q, k[..., :3], v)
    with pytest.raises(ValueError, match="must be on one device"):
        tt.attention(q, k, v, seqlens_k=torch.tensor([1, 2]))
    assert tt.explain(q, k, v).backend == "cpu"


def flops(function, *inputs):
    with FlopCounterMode(display=False) as counter:
        function(*[x.clone().requires_grad_() for x in inputs]).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("q, k, v", [((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
                                     ((1, 4, 16, 16), (1, 4, 16, 16), (1, 4, 16, 16))])
def test_operations_are_counted_as_of_sdpa(q, k, v):
    inputs = [normal(*shape) for shape in (q, k, v)]
    assert flops(tt.scaled_dot_product_attention, *inputs) == \
        flops(F.scaled_dot_product_attention, *inputs) > 0


def test_operations_of_packed_and_paged_calls():
    q, k = normal(8, 4, 16), normal(5, 2, 16)
    packed = dict(layout="thd", cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K)
    pairs = 4 * (3 * 4 + 5 * 1)
    assert flops(lambda q, k: tt.attention(q, k, k, **packed), q, k) == 2 * pairs * (32 + 80)
    packed["layout"] = "bshd"  # one row of them
    assert flops(lambda q, k: tt.attention(q, k, k, **packed), q[None], k[None]) == 2 * pairs * (32 + 80)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tt.attention(normal(2, 1, 4, 16), *[normal(3, 4, 2, 16)] * 2, seqlens_k=torch.tensor([4, 7]),
                     page_table=torch.tensor([[0, 1], [2, 0]], dtype=torch.int32))
    assert counter.get_total_flops() == 2 * 2 * 4 * 8 * 32


class Model(torch.nn.Module):
    def forward(self, q, k, v, bias, seqlens):
        o = tt.attention(q.sin(), k, v, causal=True, align="top_left", softmax_scale=0.3, bias=bias,
                         sink="off_by_one", seqlens_k=seqlens)
        return tt.scaled_dot_product_attention(o.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                               is_causal=True) + 1


def example(s=6):
    return (*(normal(2, s, 2, 8, seed=i) for i in range(3)), normal(1, 1, 1, s),
            torch.tensor([s, s - 1], dtype=torch.int32))


def test_export_saves_and_runs_at_other_lengths(tmp_path):
    s = torch.export.Dim("s", min=2, max=64)
    shapes = ({1: s}, {1: s}, {1: s}, {3: s}, None)
    program = torch.export.export(Model(), example(), dynamic_shapes=shapes)
    names = {str(node.target) for node in program.graph.nodes}
    assert "tessera.attention.default" in names
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for n in (6, 33):
        close(loaded(*example(n)), Model()(*example(n)))
    assert program.run_decompositions() is not None


@pytest.mark.skipif(not shutil.which("c++"), reason="AOTInductor needs a C++ compiler")
def test_aot_inductor(tmp_path):
    program = torch.export.export(Model(), example())
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    close(torch._inductor.aoti_load_package(path)(*example()), Model()(*example()))


class Traced(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.projection, self.function = torch.nn.Linear(8, 8), function

    def forward(self, x):
        return self.function(self.projection(x))


CU = torch.tensor([0, 2, 5], dtype=torch.int32)
TRACED = {
    "attention": lambda x: tt.attention(x, x, x, causal=True),
    "lse": lambda x: tt.attention(x, x, x, return_lse=True)[1],
    "bias": lambda x: tt.attention(x, x, x, bias=torch.ones(1, 1, 1, 1)),
    "lengths": lambda x: tt.attention(x, x, x, seqlens_k=CU[1:2]),
    "sdpa": lambda x: tt.scaled_dot_product_attention(x, x, x, torch.ones(2, 2).bool()),
    "merge": lambda x: tt.merge([tt.attention(x, x, x, return_lse=True)] * 2)[0],
}


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("name", TRACED)
def test_traces_are_saved_and_run_at_other_lengths(name, gradient, tmp_path):
    x, module = normal(1, 5, 2, 8), Traced(TRACED[name])
    tt._functions._kept.clear()  # a first call describes more than a second, and traces the same
    tt._functions._known.clear()
    with torch.set_grad_enabled(gradient):
        torch.jit.trace(module, x).save(tmp_path / "module.pt")
    loaded, longer = torch.jit.load(tmp_path / "module.pt"), normal(1, 9, 2, 8)
    for given in (x, longer):
        out, expected = loaded(given), module(given)
        close(out, expected)
        same = zip(*(torch.autograd.grad(o.square().sum(), m.parameters())
                     for o, m in ((out, loaded), (expected, module))))
        for ours, theirs in same:
            close(ours, theirs)


def test_onnx_by_torchscript(monkeypatch):
    """Attention has no operator there and says so; the drop-in is PyTorch's, which has."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    x = normal(1, 5, 2, 8)
    graph = torch.jit.trace(Traced(TRACED["sdpa"]), x).inlined_graph
    assert "aten::scaled_dot_product_attention" in str(graph)
    with pytest.raises(tt.Refused, match="torch.export.export"):
        torch.jit.trace(Traced(TRACED["attention"]), x)


def test_raw_backward_functions_take_an_expanded_scalar():
    """As sum().backward() hands it to autograd."""
    from tessera.flash_attn.flash_attn_interface import _flash_attn_backward
    from tessera.xformers.fmha import memory_efficient_attention_backward
    q = normal(1, 5, 2, 8, grad=True)
    o, lse = tt.attention(q, q, q, return_lse=True)
    expected, = torch.autograd.grad(o.sum(), q)
    do, q, o, lse = torch.ones(()).expand(o.shape), *(x.detach() for x in (q, o, lse))
    into = [torch.empty_like(q) for _ in range(3)]
    _flash_attn_backward(do, q, q, q, o, lse, *into, 0.0, 8**-0.5, False, -1, -1, 0.0, None, False)
    g = tt.attention_backward(do, q, q, q, o, lse, dlse=torch.zeros(()).expand(lse.shape))
    for dq, dk, dv in (into, (g.dq, g.dk, g.dv), memory_efficient_attention_backward(do, o, lse, q, q, q)):
        close(dq + dk + dv, expected)


def test_merge_in_one_graph():
    def both(x):
        part = tt.attention(x, x, x, return_lse=True)
        o, lse = tt.merge([part, part], layout="bshd", out_dtype="float32")
        return o.square().sum() + lse.sum()

    x = normal(1, 5, 2, 8, grad=True)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    close(*(torch.autograd.grad(f(x), x)[0] for f in (compiled, both)))
    with pytest.raises(ValueError, match="parts=.*at least one pair"):
        tt.merge([])


def test_second_derivatives_and_forward_mode_name_what_to_use():
    q = normal(1, 2, 5, 8, grad=True)
    gradient, = torch.autograd.grad(tt.scaled_dot_product_attention(q, q, q).square().sum(), q,
                                    create_graph=True)
    with pytest.raises(tt.Refused, match="differentiate once.*SDPBackend.MATH"):
        gradient.sum().backward()
    with pytest.raises(tt.Refused, match="torch.func.vjp.*SDPBackend.MATH"):
        torch.func.jvp(lambda x: tt.scaled_dot_product_attention(x, x, x), (q.detach(),), (q.detach(),))


def test_v_is_found_in_a_latent_cache():
    """v as the first columns of k, which a kernel may read once: the same result as of a copy."""
    q, cache = normal(2, 1, 4, 48, grad=False), normal(2, 70, 1, 48, seed=1, grad=False)
    v = cache[..., :32]
    assert " vink" in tt.explain(q, cache, v).headline
    for other in (v.contiguous(), cache[..., 8:40], cache):
        assert " vink" not in tt.explain(q, cache, other).headline
    assert torch.equal(tt.attention(q, cache, v), tt.attention(q, cache, v.contiguous()))
