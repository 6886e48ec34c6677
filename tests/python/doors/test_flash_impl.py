# SPDX-License-Identifier: Apache-2.0
"""tessera in PyTorch's own registry of flash attention: activate_flash_attention_impl("tessera").

PyTorch itself runs here, unpatched; what it computed before is what ours is compared with. TESSERA_TEST_DEVICE=cuda
runs all of it on a GPU, in bf16 where PyTorch's fused attention takes no float32.
"""
import inspect
import runpy
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
registry = pytest.importorskip("torch.nn.attention")
if not hasattr(registry, "register_flash_attention_impl"):
    pytest.skip("this PyTorch has no registry", allow_module_level=True)

from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.varlen import varlen_attn  # noqa: E402

import door_examples  # noqa: E402
import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402
from tessera.doors import flash_impl  # noqa: E402

aten = torch.ops.aten
CUDA = torch.get_default_device().type == "cuda"
DTYPE = torch.bfloat16 if CUDA else torch.float32
CLOSE = dict(atol=3e-2, rtol=3e-2) if CUDA else dict(atol=2e-5, rtol=1e-5)
SCRIPT = Path(__file__).with_name("nanogpt.py")


@contextmanager
def activated():
    registry.activate_flash_attention_impl("tessera")
    try:
        yield
    finally:
        registry.restore_flash_attention_impl()


@pytest.fixture
def calls(monkeypatch):
    """Operators of tessera that PyTorch's operators called."""
    seen = []

    def counted(name, operator):
        return lambda *arguments: seen.append(name) or operator(*arguments)

    for name in ("attention", "attention_backward", "attention_into_op"):
        monkeypatch.setattr(flash_impl._ops, name, counted(name, getattr(flash_impl._ops, name)))
    return seen


def normal(*shape, seed=0, grad=True):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DTYPE).requires_grad_(grad)


def qkv(b=2, h=4, hk=4, sq=9, sk=9, d=16):
    return normal(b, h, sq, d), normal(b, hk, sk, d, seed=1), normal(b, hk, sk, d, seed=2)


def with_gradients(function, inputs):
    o = function(*inputs)
    return o, *torch.autograd.grad(o.float().square().sum(), inputs)


def close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_it_is_listed_and_not_active():
    assert "tessera" in registry.list_flash_attention_impls()
    assert registry.current_flash_attention_impl() is None
    with activated():
        assert registry.current_flash_attention_impl() == "tessera"
    assert registry.current_flash_attention_impl() is None


@pytest.mark.parametrize("sizes, keywords", [
    ({}, {}),
    ({}, dict(is_causal=True)),
    ({}, dict(scale=0.5)),
    ({}, dict(scale=-0.3, is_causal=True)),
    (dict(h=6, hk=2), dict(enable_gqa=True, is_causal=True)),
    (dict(sq=5, sk=11), {}),
    pytest.param({}, dict(attn_mask=torch.arange(81).reshape(9, 9) % 3 > 0), id="mask"),
    pytest.param({}, dict(attn_mask=torch.linspace(-1, 1, 81, dtype=DTYPE).reshape(9, 9)), id="bias"),
])
def test_scaled_dot_product_attention(calls, sizes, keywords):
    inputs = qkv(**sizes)
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]  # of which a mask takes cuDNN's

    def function(q, k, v):
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(q, k, v, **keywords)

    with sdpa_kernel(SDPBackend.MATH):
        theirs = with_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **keywords), inputs)
    with activated():
        ours = with_gradients(function, inputs)
    assert len(calls) == 2 and calls[0] == "attention", calls
    close(ours, theirs)


def test_any_strides(calls):
    inputs = [x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in qkv()]
    with sdpa_kernel(SDPBackend.MATH):
        theirs = with_gradients(F.scaled_dot_product_attention, inputs)
    with activated():
        close(with_gradients(lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v)[0], inputs), theirs)
    assert calls


@pytest.mark.parametrize("entry", ["flash", "cudnn"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_the_entries_of_cuda(entry, dropout_p):
    """scaled_dot_product_attention calls them on CUDA; here on either device, with their backward and dropout."""
    inputs = qkv()
    kept = []

    def function(q, k, v):
        if entry == "flash":
            o, lse, *_, seed, _, _ = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, True)
            assert seed.dtype == torch.uint64 and seed.shape == (2,)
            kept.extend((lse, seed.view(torch.int64)))
        else:
            o, lse, *_, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, dropout_p, True)
            kept.extend((lse.squeeze(-1), torch.stack([seed, offset])))
        return o

    with activated():
        ours = with_gradients(function, inputs)
    lse, state = kept
    dropout = dict(dropout_p=dropout_p, rng_state=state) if dropout_p else {}
    theirs = with_gradients(lambda q, k, v: tt.attention(q, k, v, layout="bhsd", causal=True, **dropout), inputs)
    close(ours, theirs)
    torch.testing.assert_close(lse, tt.attention(*inputs, layout="bhsd", causal=True, return_lse=True)[1])


def test_dropout_is_new_at_every_call_and_seeded():
    def drawn():
        return aten._scaled_dot_product_flash_attention(*qkv(), 0.5)[0]

    with activated():
        torch.manual_seed(3)
        first, second = drawn(), drawn()
        torch.manual_seed(3)
        assert torch.equal(first, drawn()) and not torch.equal(first, second)


def test_fp8():
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).to(torch.float8_e4m3fn) for x in qkv(h=4, hk=2))
    q_scale, k_scale, v_scale = (torch.tensor([[1.0, 2.0], [0.5, 1.5]]) * x for x in (1, 0.5, 2))
    with activated():
        o = aten._scaled_dot_product_flash_attention.quantized(q, k, v, q_scale, k_scale, v_scale)[0]
    wide = [x.float() * scale[..., None, None] for x, scale in (
        (q, q_scale.repeat_interleave(2, -1)), (k, k_scale), (v, v_scale))]
    with sdpa_kernel(SDPBackend.MATH):
        theirs = F.scaled_dot_product_attention(*wide, enable_gqa=True)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.float(), theirs, atol=0.1, rtol=0.1)


# ---- varlen_attn ----

LENGTHS = [5, 0, 9, 3]
GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}  # not in 2.11


def packed(h=4, hk=4, d=16):
    cu = torch.tensor([0, *torch.tensor(LENGTHS, device="cpu").cumsum(0)], dtype=torch.int32)
    t = sum(LENGTHS)
    return (normal(t, h, d), normal(t, hk, d, seed=1), normal(t, hk, d, seed=2)), cu


def by_sequence(q, k, v, window):
    """varlen_attn in PyTorch's math, sequence by sequence."""
    parts = []
    for x, y, z in zip(*(a.split(LENGTHS) for a in (q, k, v))):
        i, j = torch.arange(len(x))[:, None], torch.arange(len(x))
        keep = ((window[0] < 0) | (j >= i - window[0])) & ((window[1] < 0) | (j <= i + window[1]))
        with sdpa_kernel(SDPBackend.MATH):
            parts.append(F.scaled_dot_product_attention(*(a.transpose(0, 1) for a in (x, y, z)), attn_mask=keep,
                                                        enable_gqa=True).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, None], ids=["flash", "any"])
def test_varlen_attn(calls, window, backend):
    from torch.nn.attention.varlen import AuxRequest
    inputs, cu = packed(h=4, hk=2)
    theirs = with_gradients(lambda *x: by_sequence(*x, window), inputs)
    rows = []

    def function(q, k, v):
        o, lse = varlen_attn(q, k, v, cu, cu, max(LENGTHS), max(LENGTHS), window_size=window, **GQA,
                             return_aux=AuxRequest(lse=True))
        rows.append(lse)
        return o

    with activated(), sdpa_kernel(backend or [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        ours = with_gradients(function, inputs)
    close(ours, theirs)
    assert rows[0].shape == (4, sum(LENGTHS)) and calls.count("attention") <= 1


def test_varlen_attn_out():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("PyTorch 2.11 has no varlen_attn_out")
    inputs, cu = packed()
    inputs = [x.detach() for x in inputs]
    out = torch.zeros_like(inputs[0])
    with activated():
        varlen.varlen_attn_out(out, *inputs, cu, cu, max(LENGTHS), max(LENGTHS), window_size=(-1, 0))
    close([out], [by_sequence(*inputs, (-1, 0))])


def test_varlen_attn_of_pages_and_one_split():
    """num_splits=1: a sequence has the bits that it has alone."""
    if "num_splits" not in inspect.signature(varlen_attn).parameters:
        pytest.skip("PyTorch 2.11's varlen_attn has no pages")
    page, used = 16, [20, 7]
    pool_k, pool_v = (normal(4, page, 2, 16, seed=seed, grad=False) for seed in (1, 2))
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    q = normal(2, 4, 16, grad=False)

    def attend(q, table, used):
        cu = torch.arange(len(used) + 1, dtype=torch.int32)
        return varlen_attn(q, pool_k, pool_v, cu, None, 1, 2 * page, window_size=(-1, 0), **GQA,
                           seqused_k=torch.tensor(used, dtype=torch.int32), block_table=table, num_splits=1)

    with activated():
        o = attend(q, table, used)
        assert torch.equal(o[:1], attend(q[:1], table[:1], used[:1]))
    for i, n in enumerate(used):
        k, v = (pool[table[i].long()].flatten(0, 1)[:n].transpose(0, 1) for pool in (pool_k, pool_v))
        with sdpa_kernel(SDPBackend.MATH):
            close([o[i, :, None]], [F.scaled_dot_product_attention(q[i, :, None], k, v, enable_gqa=True)])


def test_compiled_varlen_attn():
    inputs, cu = packed()

    def function(q, k, v):
        return varlen_attn(q, k, v, cu, cu, max(LENGTHS), max(LENGTHS), window_size=(-1, 0)) * 2

    with activated():
        ours = with_gradients(torch.compile(function, fullgraph=True, backend="aot_eager"), inputs)
        close(ours, with_gradients(function, inputs))


# ---- programs as they are ----

@pytest.mark.parametrize("arguments", [[], ["--autocast"]], ids=" ".join)
def test_a_script_as_it_is(calls, arguments):
    if CUDA and not arguments:
        pytest.skip("PyTorch's fused attention takes no float32 on CUDA")
    train = runpy.run_path(str(SCRIPT))["train"]
    theirs = train(arguments)
    assert not calls
    with activated():
        ours = train(arguments)
    assert len(calls) == 2 * 2 * len(ours)  # two layers, two passes
    assert ours == pytest.approx(theirs, abs=2e-2 if arguments else 1e-4)


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
def test_compiled_by_inductor(calls, order):
    """Inductor counts on the strides that PyTorch's kernels give. (nanogpt.py --compile is this and 12 seconds.)"""
    inputs = qkv() if order == "bhsd" else [
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv()]

    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with activated():
        eager = with_gradients(function, inputs)
        calls.clear()
        close(with_gradients(torch.compile(function, fullgraph=True), inputs), eager)
    assert len(calls) == 2


def test_a_graph_that_was_compiled_before(calls):
    inputs = qkv()
    compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), fullgraph=True)
    theirs = compiled(*inputs)
    assert not calls
    with activated():
        close([compiled(*inputs)], [theirs])
    assert calls == ["attention"]


def test_the_example(capsys):
    text = door_examples.printed("torch_registry", capsys)
    theirs, ours, again = door_examples.losses(text)
    near = pytest.approx(ours, abs=2e-2 if CUDA else 1e-3)
    assert theirs == near and again == near and ours[-1] < ours[0] / 2
    assert door_examples.calls(text) == [0, 2 * 2 * len(ours), 0]  # layers, passes


# ---- undone, refused, changed ----

def test_restore_brings_back_the_bits():
    inputs = qkv()
    before = with_gradients(F.scaled_dot_product_attention, inputs)
    with activated():
        pass
    after = with_gradients(F.scaled_dot_product_attention, inputs)
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    if not CUDA:  # where PyTorch has no kernel of its own
        with pytest.raises(NotImplementedError):
            aten._scaled_dot_product_flash_attention(*inputs)


def test_what_is_refused_says_so():
    q, k, v = (x.double() for x in qkv())
    with activated():
        with pytest.raises(tessera.Refused, match="fp64"):
            aten._scaled_dot_product_flash_attention(q, k, v)
        with pytest.raises(tessera.Refused, match="return_debug_mask=True.*restore_flash_attention_impl"):
            aten._scaled_dot_product_flash_attention(*qkv(), 0.0, False, True)


def test_a_changed_interface_is_one_error(monkeypatch):
    """As if a newer PyTorch's operator took an argument that the door does not know."""
    name = "_scaled_dot_product_flash_attention_backward"
    monkeypatch.setitem(flash_impl._KERNELS, name, (lambda grad_out, query: None, ("CPU",)))
    with pytest.raises(RuntimeError, match=f"aten::{name} takes key, value.*{flash_impl.TESTED}"):
        registry.activate_flash_attention_impl("tessera")
    assert registry.current_flash_attention_impl() is None
    theirs = F.scaled_dot_product_attention(*qkv())
    with sdpa_kernel(SDPBackend.MATH):
        close([theirs], [F.scaled_dot_product_attention(*qkv())])


def test_an_operator_that_this_pytorch_lacks_is_left_out(monkeypatch):
    monkeypatch.setitem(flash_impl._KERNELS, "_no_such_attention", (lambda query: None, ("CPU",)))
    with activated():
        assert registry.current_flash_attention_impl() == "tessera"


def test_importing_tessera_imports_no_door():
    code = ("import sys, tessera.torch\n"
            "print(sorted(m for m in sys.modules if m.startswith('tessera.doors.') or m == 'transformers'))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": ":".join(sys.path), "PATH": ""})
    assert done.stdout.strip() == "[]"
