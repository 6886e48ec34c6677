# SPDX-License-Identifier: Apache-2.0
"""tessera as SGLang's attention backend, in a stand-in of SGLang 0.5.23: its registry, lists and hooks, a runner with
its pools, and batches as its scheduler makes them. SGLang itself needs CUDA."""
import collections
import enum
import importlib
import re
import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
from tessera.torch import attention  # noqa: E402

CLOSE = dict(atol=2e-5, rtol=1e-5)
OURS = ("tessera.doors.sglang_plugin", "tessera.doors.sglang_backend")
HQ, HK, D, CONTEXT = 4, 2, 16, 32
KVWriteLoc = collections.namedtuple("KVWriteLoc", ["loc", "swa_loc"])


class ForwardMode(enum.IntEnum):
    EXTEND, DECODE, TARGET_VERIFY = 1, 2, 3

    def is_decode_or_idle(self):
        return self == ForwardMode.DECODE

    def is_target_verify(self):
        return self == ForwardMode.TARGET_VERIFY


class AttentionBackend:
    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False): ...
    def init_cuda_graph_state(self, max_bs, max_num_tokens): ...
    def forward_decode(self, *_): ...
    def forward_extend(self, *_): ...


class HookRegistry:
    _hooks = collections.defaultdict(list)

    @classmethod
    def register(cls, target, hook, hook_type):
        cls._hooks[target].append((hook_type, hook, None))


@pytest.fixture
def sglang(monkeypatch):
    made = {}
    for name in ("srt.arg_groups.choices", "srt.layers.attention.attention_registry", "srt.plugins.hook_registry",
                 "srt.layers.attention.base_attn_backend", "srt.mem_cache.memory_pool",
                 "srt.model_executor.forward_batch_info"):
        parts = ["sglang", *name.split(".")]
        for i in range(1, len(parts) + 1):
            place = ".".join(parts[:i])
            if place not in made:
                made[place] = types.ModuleType(place)
                made[place].__path__ = []
                monkeypatch.setitem(sys.modules, place, made[place])
                if i > 1:
                    setattr(made[".".join(parts[:i - 1])], parts[i - 1], made[place])
    choices, registry = made["sglang.srt.arg_groups.choices"], made["sglang.srt.layers.attention.attention_registry"]
    for name in ("ATTENTION_BACKEND_CHOICES", "DRAFT_ATTENTION_BACKEND_CHOICES",
                 "DETERMINISTIC_ATTENTION_BACKEND_CHOICES", "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND"):
        setattr(choices, name, ["fa3", "triton"])
    registry.ATTENTION_BACKENDS = {}
    registry.register_attention_backend = lambda name: lambda make: registry.ATTENTION_BACKENDS.setdefault(name, make)
    hooks = made["sglang.srt.plugins.hook_registry"]
    hooks.HookType, hooks.HookRegistry = enum.Enum("HookType", "BEFORE AFTER AROUND REPLACE"), HookRegistry
    monkeypatch.setattr(HookRegistry, "_hooks", collections.defaultdict(list))
    made["sglang.srt.layers.attention.base_attn_backend"].AttentionBackend = AttentionBackend
    made["sglang.srt.mem_cache.memory_pool"].KVWriteLoc = KVWriteLoc
    info = made["sglang.srt.model_executor.forward_batch_info"]
    info.ForwardMode = ForwardMode
    info.build_inner_fb_view = lambda batch, bs, forward_mode, encoder_lens: types.SimpleNamespace(
        **{**vars(batch), "batch_size": bs, "forward_mode": forward_mode})
    for name in OURS:
        sys.modules.pop(name, None)
    yield made
    for name in OURS:
        sys.modules.pop(name, None)


@pytest.fixture
def door(sglang):
    return importlib.import_module(OURS[0])


class Pool:
    """[tokens, hk, d] of one layer; with swa, of a pool whose tokens lie elsewhere."""

    def __init__(self, dtype=torch.float32, swa=False):
        self.k, self.v = (torch.zeros(128, HK, D, dtype=dtype) for _ in range(2))
        self.elsewhere = torch.arange(128).flip(0)
        self.swa_layer_nums = int(swa)

    def translate_loc_from_full_to_swa(self, tokens):
        return self.elsewhere[tokens.long()]

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v

    def set_kv_buffer(self, layer, loc, k, v, k_scale=None, v_scale=None):
        place = loc.swa_loc if self.swa_layer_nums else loc.loc
        for pool, x, scale in ((self.k, k, k_scale), (self.v, v, v_scale)):
            pool[place] = (x if scale is None else x.div_(scale)).to(pool.dtype)


def runner_of(page_size=1, deterministic=False, **pool):
    rows = torch.arange(3 * CONTEXT, dtype=torch.int32).reshape(3, -1)  # or every third token, where pages are of one
    table = rows.flip(0) if page_size > 1 else rows.reshape(-1, 3).T.contiguous()
    return types.SimpleNamespace(
        device="cpu", page_size=page_size, use_mla_backend=False, token_to_kv_pool=Pool(**pool),
        req_to_token_pool=types.SimpleNamespace(req_to_token=table),
        model_config=types.SimpleNamespace(context_len=CONTEXT),
        server_args=types.SimpleNamespace(enable_deterministic_inference=deterministic))


def layer_of(**words):
    return types.SimpleNamespace(**{**dict(
        tp_q_head_num=HQ, qk_head_dim=D, v_head_dim=D, scaling=0.3, layer_id=0, logit_cap=0.0, sliding_window_size=-1,
        is_cross_attention=False, attn_type="decoder", k_scale=None, v_scale=None, logit_capping_method="tanh",
        xai_temperature_len=-1), **words})


def batch_of(runner, requests, lengths, new, mode, spec=None):
    """lengths: what SGLang calls seq_lens, of requests with `new` tokens each."""
    more = new[0] if mode == ForwardMode.TARGET_VERIFY else 0
    table = runner.req_to_token_pool.req_to_token
    loc = torch.cat([table[r, n + more - fresh:n + more] for r, n, fresh in zip(requests, lengths, new)]).long()
    return types.SimpleNamespace(
        forward_mode=mode, batch_size=len(requests), seq_lens=torch.tensor(lengths), seq_lens_cpu=torch.tensor(lengths),
        req_pool_indices=torch.tensor(requests), out_cache_loc=loc, spec_info=spec, encoder_lens=None,
        extend_seq_lens=torch.tensor(new), extend_seq_lens_cpu=list(new))


def sequences(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(CONTEXT, h, D, generator=generator).to(dtype) for _ in range(3)] for h in (HQ, HK, HK)]


def run(backend, runner, layer, requests, lengths, new, mode, spec=None, seen=None, ready=None, **words):
    """(o, the same of attention over each request alone)."""
    q, k, v = sequences(torch.float32 if runner.token_to_kv_pool.k.dtype != torch.float8_e4m3fn else torch.bfloat16)
    batch = batch_of(runner, requests, lengths, new, mode, spec)
    (ready or backend.init_forward_metadata)(batch)
    totals = [n + (new[0] if mode == ForwardMode.TARGET_VERIFY else 0) for n in lengths]
    fresh = [torch.cat([x[r][n - m:n] for r, n, m in zip(requests, totals, new)]) for x in (q, k, v)]
    forward = backend.forward_decode if mode == ForwardMode.DECODE else backend.forward_extend
    o = forward(fresh[0].flatten(1), *fresh[1:], layer, batch, **words)
    keywords = dict(causal=True, align="bottom_right", softmax_scale=layer.scaling) if seen is None else seen
    if "sinks" in words:
        keywords["sink"] = words["sinks"]
    theirs = torch.cat([attention(q[r][None, n - m:n], k[r][None, :n], v[r][None, :n], **keywords)[0]
                        for r, n, m in zip(requests, totals, new)])
    return o, theirs.flatten(1)


# ---- the registry ----

def test_registered_and_undone(door, sglang):
    choices, registry = sglang["sglang.srt.arg_groups.choices"], door.registry
    handle = door.register()
    assert door.register() is handle and all(getattr(choices, name)[-1] == "tessera" for name in door._LISTS)
    assert OURS[1] not in sys.modules and registry.ATTENTION_BACKENDS["tessera"](runner_of()).page_size == 1
    handle.remove()
    handle.remove()
    assert all(getattr(choices, name) == ["fa3", "triton"] for name in door._LISTS) and not registry.ATTENTION_BACKENDS
    door.register().remove()
    assert [kind.name for kind, *_ in HookRegistry._hooks[door.FACTORY]] == ["AROUND"]
    points = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
    assert re.search(r'"sglang.srt.plugins"]\ntessera = "tessera.doors.sglang_plugin:register"', points)


def test_a_changed_interface_is_one_error(door, sglang, monkeypatch):
    monkeypatch.delattr(AttentionBackend, "init_cuda_graph_state")
    with pytest.raises(RuntimeError, match="AttentionBackend has no init_cuda_graph_state.*SGLang"):
        importlib.import_module(OURS[1])
    del sglang["sglang.srt.arg_groups.choices"].DRAFT_ATTENTION_BACKEND_CHOICES
    with pytest.raises(RuntimeError, match="choices has no DRAFT_ATTENTION_BACKEND_CHOICES"):
        door.register()


# ---- attention ----

@pytest.mark.parametrize("page_size, swa", [(1, False), (4, False), (1, True)])
def test_prompts_their_chunks_and_next_tokens(door, page_size, swa):
    runner = runner_of(page_size, swa=swa)
    backend, layer = door._create(runner), layer_of(sliding_window_size=100 if swa else -1)
    for requests, lengths, new, mode in (((2, 0), (9, 5), (9, 5), ForwardMode.EXTEND),
                                         ((2, 1), (17, 3), (8, 3), ForwardMode.EXTEND),
                                         ((2, 0, 1), (18, 6, 4), (1, 1, 1), ForwardMode.DECODE)):
        torch.testing.assert_close(*run(backend, runner, layer, requests, lengths, new, mode), **CLOSE)


@pytest.mark.parametrize("words, more", [
    (dict(sliding_window_size=4), dict(window=(4, 0))), (dict(logit_cap=2.0), dict(softcap=2.0)),
    (dict(attn_type="encoder_only"), dict(causal=False, align=None))], ids=str)
def test_what_a_layer_says(door, words, more):
    runner = runner_of()
    seen = {**dict(causal=True, align="bottom_right", softmax_scale=0.3), **more}
    torch.testing.assert_close(*run(door._create(runner), runner, layer_of(**words), (0, 1), (9, 7), (9, 7),
                                    ForwardMode.EXTEND, seen=seen), **CLOSE)


def test_sinks_fp8_and_determinism(door):
    runner = runner_of()
    torch.testing.assert_close(*run(door._create(runner), runner, layer_of(), (0, 1), (9, 7), (9, 7),
                                    ForwardMode.EXTEND, sinks=torch.linspace(-1, 2, HQ)), **CLOSE)
    runner = runner_of(dtype=torch.float8_e4m3fn)
    layer = layer_of(k_scale=torch.tensor(0.5), v_scale=torch.tensor(2.0))
    ours, theirs = run(door._create(runner), runner, layer, (0, 1), (9, 7), (9, 7), ForwardMode.EXTEND)
    torch.testing.assert_close(ours, theirs, atol=0.2, rtol=0.1)
    runner, more = runner_of(deterministic=True), dict(causal=True, align="bottom_right", softmax_scale=0.3)
    assert torch.equal(*run(door._create(runner), runner, layer_of(), (0, 1), (9, 7), (9, 7), ForwardMode.EXTEND,
                            seen=dict(more, batch_invariant=True)))


# ---- graphs and drafts ----

def test_graphs_keep_their_tensors(door):
    runner = runner_of()
    backend, layer = door._create(runner), layer_of()
    run(backend, runner, layer, (0, 1), (9, 7), (9, 7), ForwardMode.EXTEND)
    backend.init_cuda_graph_state(4, 16)
    places = []
    for lengths in ((10, 8), (11, 9)):
        o = run(backend, runner, layer, (0, 1), lengths, (1, 1), ForwardMode.DECODE,
                ready=backend.init_forward_metadata_out_graph)
        torch.testing.assert_close(*o, **CLOSE)
        meta = backend.forward_metadata
        places.append([x.data_ptr() for x in (meta.cu_seqlens, meta.seqlens_k, meta.page_table)])
    assert places[0] == places[1]


def test_draft_workers(door):
    def original(factory, backend_name, backend_map, error_template, stamps_children=False):
        return backend_map["tessera"]()

    door.register()
    runner = runner_of()
    factory = types.SimpleNamespace(draft_model_runner=runner, topk=1, speculative_num_steps=3)
    name, steps = door._draft(original, factory, "decode_attention_backend", {}, "", stamps_children=True)
    assert name == "tessera" and [backend.step for backend in steps.attn_backends] == [1, 2]
    assert door._draft(original, factory, "decode_attention_backend", {}, "")[1].step == 0
    layer = layer_of()
    run(steps.attn_backends[0], runner, layer, (0, 1), (9, 7), (9, 7), ForwardMode.EXTEND)
    batch = batch_of(runner, (0, 1), (9, 7), (1, 1), ForwardMode.DECODE)
    steps.init_cuda_graph_state(2, 2)
    for ready in (steps.init_forward_metadata, steps.init_forward_metadata_out_graph):
        ready(batch)
        for i, backend in enumerate(steps.attn_backends):  # keys of the steps before are in the pool
            torch.testing.assert_close(*run(backend, runner, layer, (0, 1), (10 + i, 8 + i), (1, 1), ForwardMode.DECODE,
                                            ready=lambda _: None), **CLOSE)
    spec = types.SimpleNamespace(topk=1, draft_token_num=3)
    target = door._create(runner)
    torch.testing.assert_close(*run(target, runner, layer, (0, 1), (9, 7), (3, 3), ForwardMode.TARGET_VERIFY, spec),
                               **CLOSE)
    with pytest.raises(tessera.Refused, match="topk=2"):
        run(target, runner, layer, (0, 1), (9, 7), (3, 3), ForwardMode.TARGET_VERIFY,
            types.SimpleNamespace(topk=2, draft_token_num=3))
    with pytest.raises(tessera.Refused, match="topk=4"):
        door._draft(original, types.SimpleNamespace(**{**vars(factory), "topk": 4}), "", {}, "", stamps_children=True)


def test_what_is_refused_says_so(door):
    runner = runner_of()
    for words, keywords in ((dict(is_cross_attention=True), {}), (dict(xai_temperature_len=8), {}),
                            ({}, dict(k_rope=torch.ones(1)))):
        with pytest.raises(tessera.Refused, match="choose another --attention-backend"):
            run(door._create(runner), runner, layer_of(**words), (0,), (3,), (3,), ForwardMode.EXTEND, **keywords)
    runner.use_mla_backend = True
    with pytest.raises(tessera.Refused, match="MLA"):
        door._create(runner)
