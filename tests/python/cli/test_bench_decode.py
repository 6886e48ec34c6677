# SPDX-License-Identifier: Apache-2.0
"""bench's peers for decode, against stand-ins of their documented interfaces; and its grids."""
import argparse
import importlib.machinery
import sys
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
import tessera.torch  # noqa: E402
from tessera.cli import bench, bench_devices, case_lines, conformance  # noqa: E402
from tessera.cli import decode_grid, peers, work  # noqa: E402
from tessera.cli.peers import decode  # noqa: E402


def attend(q, k, v, scale):
    """q [h, d] over k [s, hk, d], v [s, hk, dv], in fp32."""
    k, v = (x.float().repeat_interleave(q.shape[0] // x.shape[1], 1) for x in (k, v))
    return torch.einsum("hs,shd->hd", (torch.einsum("hd,shd->hs", q.float(), k) * scale).softmax(-1), v)


class Planned:
    """What both wrappers of FlashInfer are told of pages: sequence n has indices[indptr[n]:indptr[n + 1]]."""

    def keep(self, indptr, indices, last):
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32
        assert indptr[0] == 0 and indptr[-1] == len(indices)
        self.indptr, self.indices = indptr.tolist(), indices

    def of(self, cache, n, length):
        return cache[self.indices[self.indptr[n]:self.indptr[n + 1]].long()].flatten(0, 1)[:length]


class BatchDecodeWithPagedKVCacheWrapper(Planned):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False):
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD" and not use_cuda_graph
        self.use_tensor_cores = use_tensor_cores

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
             pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
             data_type=None, sm_scale=None):
        assert self.use_tensor_cores == (num_qo_heads // num_kv_heads >= 4)
        assert ((1 <= last_page_len) & (last_page_len <= page_size)).all()
        self.keep(indptr, indices, last_page_len)
        self.last, self.size, self.kv = last_page_len.tolist(), page_size, kv_data_type
        self.shape, self.scale = (num_qo_heads, head_dim), sm_scale or head_dim**-0.5

    def run(self, q, paged_kv_cache, *, q_scale=None, k_scale=None, v_scale=None):
        assert v_scale is None, "a kernel that is no attention would be timed"
        k, v = paged_kv_cache
        assert k.dtype == v.dtype == self.kv and k.shape[1] == self.size and q.shape[1:] == self.shape
        lengths = [(b - a - 1) * self.size + last
                   for a, b, last in zip(self.indptr, self.indptr[1:], self.last)]
        return torch.stack([attend(row * (k_scale or 1), self.of(k, n, length), self.of(v, n, length), self.scale)
                            for n, (row, length) in enumerate(zip(q, lengths))]).to(q.dtype)


class BatchMLAPagedAttentionWrapper(Planned):
    def __init__(self, float_workspace_buffer, backend="auto"):
        pass

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size,
             causal, sm_scale, q_data_type, kv_data_type):
        assert qo_indptr.tolist() == list(range(len(kv_len_arr) + 1)) and not causal
        self.keep(kv_indptr, kv_indices, kv_len_arr)
        self.lengths, self.scale, self.dims = kv_len_arr.tolist(), sm_scale, (head_dim_ckv, head_dim_kpe)

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache):
        assert (q_nope.shape[-1], q_pe.shape[-1]) == (ckv_cache.shape[-1], kpe_cache.shape[-1]) == self.dims
        rows = []
        for n, length in enumerate(self.lengths):
            ckv, kpe = (self.of(x, n, length)[:, None] for x in (ckv_cache, kpe_cache))
            rows.append(attend(torch.cat([q_nope[n], q_pe[n]], -1), torch.cat([ckv, kpe], -1), ckv, self.scale))
        return torch.stack(rows).to(q_nope.dtype)


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens=None, block_table=None, softmax_scale=None,
                            causal=False, window_size=(-1, -1), softcap=0.0):
    rows = []
    for n in range(len(q)):
        k, v = ((x[n] if block_table is None else x[block_table[n].long()].flatten(0, 1)) for x in (k_cache, v_cache))
        length = len(k) if cache_seqlens is None else int(cache_seqlens[n])
        rows.append(attend(q[n, 0], k[:length], v[:length], softmax_scale or q.shape[-1]**-0.5))
    return torch.stack(rows)[:, None].to(q.dtype)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The stand-ins in the place of packages, and the CPU in that of a GPU."""
    flashinfer, mla, flash = (types.ModuleType(name) for name in ("flashinfer", "flashinfer.mla", "flash_attn"))
    flashinfer.BatchDecodeWithPagedKVCacheWrapper, flashinfer.mla = BatchDecodeWithPagedKVCacheWrapper, mla
    mla.BatchMLAPagedAttentionWrapper = BatchMLAPagedAttentionWrapper
    flash.flash_attn_with_kvcache = flash_attn_with_kvcache
    for module in (flashinfer, mla, flash):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setattr(decode, "_DEVICE", "cpu")


def workload(line):
    with conformance.Case(line, as_bits=True) as case:  # which owns its arrays
        given = case.arguments()
        v_in_k = work.lies_in(given["v"], given["k"])
        given = {name: np.copy(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    q, k, v = (given.pop(name) for name in "qkv")
    return peers.Workload(q, k, k[..., :v.shape[-1]] if v_in_k else v, None, given, None)


def expected(line):
    """tessera's, of the tensors that a peer is given."""
    given = decode.tensors_of(workload(line))
    given.pop("return_lse", None)
    return tessera.torch.attention(**given)[:, 0].float()


DECODES = ["fwd bf16 b=3 sq=1 sk=128 hq=8 hk=2 d=64 page=16 lens_k=128,17,5",
           "fwd bf16 b=2 sq=1 sk=128 hq=2 hk=2 d=64", "fwd bf16 b=2 sq=1 sk=50 hq=2 hk=2 d=64 lens_k=50,7",
           "fwd bf16 b=2 sq=1 sk=64 hq=4 hk=1 d=64 page=64 kv=e4m3"]
MLA = ["fwd bf16 b=2 sq=1 sk=128 hq=16 hk=1 dqk=576 dv=512 vink",
       "fwd bf16 b=2 sq=1 sk=128 hq=16 hk=1 dqk=576 dv=512 vink page=16 lens_k=128,33"]


@pytest.mark.parametrize("name, line", [("flashinfer", line) for line in DECODES + MLA] +
                         [("flash", line) for line in DECODES[:3]])
def test_a_peer_computes_what_tessera_does(name, line):
    if "sk=50" in line and name == "flashinfer":
        assert decode._pages_of(decode.tensors_of(workload(line)))["page_size"] == 50
    result = peers.prepare(name, workload(line))()
    v_scale = decode.tensors_of(workload(line)).get("v_scale", 1.0)  # which FlashInfer leaves to a kernel of its own
    torch.testing.assert_close(result.reshape(expected(line).shape).float() * v_scale, expected(line), rtol=2e-2,
                               atol=2e-2)


@pytest.mark.parametrize("name, line, why", [
    ("flashinfer", "fwd bf16 b=2 sq=3 sk=64 h=2 d=64", "sq=3"),
    ("flashinfer", "fwd bf16 b=2 sq=1 sk=64 h=2 d=64 sink=learnable", "sink"),
    ("flashinfer", "fwd bf16 b=2 sq=1 sk=64 h=2 dqk=64 dv=32", "one head dim"),
    ("flash", "fwd bf16 b=2 sq=1 sk=64 h=2 d=64 kv=e4m3", "q's dtype"),
    ("flash", "fwd bf16 b=2 sq=1 sk=64 h=2 d=64 layout=bhsd", "layout")])
def test_a_peer_says_what_it_cannot(name, line, why):
    with pytest.raises(peers.Unsupported, match=why):
        peers.prepare(name, workload(line))


def test_a_peer_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(peers.Unsupported, match="flashinfer cannot be imported"):
        peers.prepare("flashinfer", workload(DECODES[0]))
    monkeypatch.setattr(decode, "_DEVICE", "cuda")
    with pytest.raises(peers.Unsupported, match="needs a GPU"):
        peers.prepare("flash", workload(DECODES[0]))


def test_the_goals_are_a_grid():
    lines = decode_grid.goals()
    assert len(lines) == len(set(lines)) == 3 * 3 * 4 * 4 * 2
    for line in lines:
        assert tessera.explain(line).backend == "cpu", line
        assert decode_grid.sizes_of(line).sk in (1024, 8192, 131072)
    with pytest.raises(case_lines.UsageError, match="no decode problem"):
        decode_grid.sizes_of("fwd bf16 b=1 sq=1 sk=64 h=1 d=64 causal")


class Drawing(bench_devices.Cpu):
    """A GPU's part of a grid, on the CPU."""

    def copies(self, read):
        return 2

    def drawn(self, case, backend):
        tensors = case.tensors(torch, "cpu")

        def forward():
            return tessera.torch.attention(**tensors)
        return tensors, forward(), forward

    def byte_rule(self, read, bytes_per_s, share):
        self.read, self.share = read, share
        return 1e-6


@pytest.mark.parametrize("line, read", [
    ("fwd bf16 b=2 sq=1 sk=100 hq=8 hk=2 d=64 page=16", 2 * 2 * 112 * 2 * 64 * 2 + 2 * 2 * 8 * 64 * 2),
    ("fwd bf16 b=2 sq=1 sk=64 hq=8 hk=2 d=64 kv=e4m3", 2 * 2 * 64 * 2 * 64 + 2 * 2 * 8 * 64 * 2),
    ("fwd bf16 b=2 sq=1 sk=64 hq=16 hk=1 dqk=576 dv=512 vink page=64",
     2 * 64 * 576 * 2 + 2 * 16 * (576 + 512) * 2)])
def test_a_line_of_a_grid_is_timed(line, read):
    device, args = Drawing(None), argparse.Namespace(backend=None, threads=None, mode="quick")
    entry = bench.measure(line, decode_grid.Drawn(line), ["flashinfer", "torch", "numpy"], device, args)
    assert entry["ms"] > 0 and entry["within_byte_rule"] is False and device.read == read, entry
    assert device.share == (0.9 if "e4m3" in line else 0.95)
    assert "a grid has none" in entry["peers"]["numpy"]["refused"]
    assert entry["peers"]["flashinfer"]["ms"] > 0, entry
    plain = "page" not in line and "e4m3" not in line
    assert ("ms" in entry["peers"]["torch"]) == plain


def test_what_is_drawn_is_what_its_line_says():
    for line in ("fwd bf16 b=2 sq=1 sk=100 hq=8 hk=2 d=64 page=16 kv=e4m3",
                 "fwd bf16 b=2 sq=1 sk=64 hq=16 hk=1 dqk=576 dv=512 vink"):
        drawn = decode_grid.Drawn(line)
        tensors, arrays = drawn.tensors(torch, "cpu"), drawn.arguments()
        for name in arrays:
            assert tuple(tensors[name].shape) == arrays[name].shape, name
        assert (tensors["v"].data_ptr() == tensors["k"].data_ptr()) == ("vink" in line)
        if "page_table" in tensors:
            assert np.array_equal(np.sort(tensors["page_table"].flatten().numpy()), np.arange(14))
