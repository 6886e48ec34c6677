# SPDX-License-Identifier: Apache-2.0
"""Peers that decode over a cache in pages or none: FlashInfer, flash-attn, and scaled_dot_product_attention on
tensors that are there already. Imported only where they are installed."""

from __future__ import annotations

import functools
import importlib

from .. import work
from .workload import Unsupported, first_line, refuse

_DEVICE = "cuda"              # that they need
_WORKSPACE_BYTES = 512 << 20  # of FlashInfer's partial results
_PAGE = 64                    # of a cache without pages, for libraries that know pages alone
_TENSOR_CORES_GROUP = 4       # from so many heads a key head on, by FlashInfer's advice
_UNKNOWN = ("sink", "bias", "alibi_slopes", *work.DATA_MASKS, "seqlens_q", "cu_seqlens_q", "cu_seqlens_k", "dropout_p",
            "q_start", "k_start")


def flashinfer(w):
    """BatchDecodeWithPagedKVCacheWrapper; of one latent cache, BatchMLAPagedAttentionWrapper."""
    module = _module(w, "flashinfer", "flashinfer")
    given = _decode(w, "flashinfer")
    q = given["q"]
    if q.shape[1] != 1:
        raise Unsupported(f"sq={q.shape[1]}: this bench times FlashInfer's decode, of one query a sequence")
    pages = _pages_of(given)
    if given["v"].data_ptr() == given["k"].data_ptr():
        return _flashinfer_mla(module, given, pages)
    hq, hk, d = q.shape[2], given["k"].shape[2], q.shape[3]
    if given["v"].shape[3] != d:
        raise Unsupported(f"flashinfer: dv={given['v'].shape[3]} beside dqk={d}: its decode has one head dim")
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(_workspace(q.device), "NHD",
                                                        use_tensor_cores=hq // hk >= _TENSOR_CORES_GROUP)
    left, _ = given.get("window") or (-1, -1)
    wrapper.plan(pages["indptr"], pages["indices"], pages["last_page_len"], hq, hk, d, pages["page_size"],
                 window_left=left, logits_soft_cap=given.get("softcap") or None, q_data_type=q.dtype,
                 kv_data_type=given["k"].dtype, sm_scale=given.get("softmax_scale"))
    rows, cache = q[:, 0], (pages["k"], pages["v"])
    # One scale a tensor there; where ours differ by head the time is the same, the result is not. v's would be a kernel
    # of its own behind the attention, which few models need: the result is left without it.
    k_scale = None if given.get("k_scale") is None else float(given["k_scale"].flatten()[0])
    return lambda: wrapper.run(rows, cache, k_scale=k_scale)


def _flashinfer_mla(module, given, pages):
    import torch
    q, dv = given["q"], given["v"].shape[3]
    if given["k"].dtype != q.dtype:
        raise Unsupported("flashinfer: its MLA takes a cache of q's dtype")
    wrapper = module.mla.BatchMLAPagedAttentionWrapper(_workspace(q.device), backend="auto")
    b, scale = len(q), given.get("softmax_scale")
    wrapper.plan(torch.arange(b + 1, dtype=torch.int32, device=q.device), pages["indptr"], pages["indices"],
                 pages["lengths"], q.shape[2], dv, q.shape[3] - dv, pages["page_size"], False,
                 q.shape[3]**-0.5 if scale is None else scale, q.dtype, given["k"].dtype)
    rows, cache = q[:, 0], pages["k"][:, :, 0]
    return lambda: wrapper.run(rows[..., :dv], rows[..., dv:], cache[..., :dv], cache[..., dv:])


def flash(w):
    """flash_attn_with_kvcache of FlashAttention-3 where it is installed, else of flash-attn 2."""
    try:
        module, table = _module(w, "flash", "flash_attn_interface"), "page_table"
    except Unsupported:
        module, table = _module(w, "flash", "flash_attn"), "block_table"
    given = _decode(w, "flash")
    if given["k"].dtype != given["q"].dtype:
        raise Unsupported("flash: takes a cache of q's dtype")
    left, right = given.get("window") or (-1, -1)
    options = dict(softmax_scale=given.get("softmax_scale"), causal=bool(given.get("causal")),
                   window_size=(left, right), softcap=given.get("softcap") or 0.0)
    if given.get("page_table") is not None:
        options[table] = given["page_table"]
    lengths = given.get("seqlens_k")
    if lengths is not None:
        options["cache_seqlens"] = lengths
    return _checked("flash", lambda: module.flash_attn_with_kvcache(given["q"], given["k"], given["v"], **options))


def sdpa(w, kernel_choice):
    """PyTorch's scaled_dot_product_attention on tensors as they lie; kernel_choice() picks the kernel."""
    import torch
    given = _decode(w, "scaled_dot_product_attention")
    if given.get("page_table") is not None:
        raise Unsupported("scaled_dot_product_attention has no page_table")
    if given["k"].dtype != given["q"].dtype:
        raise Unsupported("scaled_dot_product_attention takes a cache of q's dtype")
    q, k, v = (given[name].transpose(1, 2) for name in "qkv")

    def run():
        with torch.no_grad(), kernel_choice():
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, scale=given.get("softmax_scale"), enable_gqa=q.shape[1] != k.shape[1])
    return run


# ---- what they are given ----

def tensors_of(w) -> dict:
    """q, k, v and the keywords as tensors: the next set of those that are drawn on the device, or copies."""
    if w.drawn is not None:
        return next(w.drawn)
    from ..through.torch import placer
    place = placer(w.device)
    given = {name: place(value) for name, value in {"q": w.q, "k": w.k, "v": w.v, **w.keywords}.items()}
    if work.lies_in(w.v, w.k):
        given["v"] = given["k"][..., :w.v.shape[-1]]
    return given


def _decode(w, name: str) -> dict:
    """tensors_of, where all queries see all keys of their sequence."""
    kw = w.keywords
    if w.backward:
        raise Unsupported(f"{name}: is timed in the forward pass here")
    refuse(w, _UNKNOWN, name + ": {} is not translated by this bench")
    if kw.get("layout", "bshd") != "bshd":
        raise Unsupported(f"{name}: layout={kw['layout']!r} is not translated by this bench")
    banded = kw.get("causal") or kw.get("window") is not None
    if banded and w.q.shape[1] > 1 and kw.get("align") != "bottom_right":
        raise Unsupported(f"{name}: aligns a causal mask at the bottom right")
    return tensors_of(w)


def _pages_of(given) -> dict:
    """The cache in FlashInfer's words: the pages of sequence n are indices[indptr[n]:indptr[n + 1]]."""
    import torch
    k, v, table, device = given["k"], given["v"], given.get("page_table"), given["q"].device
    if table is None:
        b, sk = k.shape[:2]
        size = _PAGE if sk % _PAGE == 0 else sk
        k, v = (x.unflatten(1, (sk // size, size)).flatten(0, 1) for x in (k, v))
        table = torch.arange(len(k), dtype=torch.int32, device=device).view(b, -1)
        lengths = torch.full((b,), sk, dtype=torch.int32, device=device)
        if given.get("seqlens_k") is not None:
            lengths = given["seqlens_k"].int()
    else:
        if isinstance(table, tuple):
            raise Unsupported("flashinfer: k and v share a page table there")
        size, lengths = k.shape[1], given["seqlens_k"].int()
        pages = min(len(k), len(v))
        k, v = k[:pages], v[:pages]
    counts = (lengths + size - 1) // size
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int32, device=device)
    indptr[1:] = counts.cumsum(0)
    used = torch.arange(table.shape[1], device=device) < counts[:, None]
    return dict(k=k, v=v, page_size=size, indptr=indptr, indices=table[used].contiguous(), lengths=lengths,
                last_page_len=(lengths - (counts - 1) * size).int())


@functools.cache
def _workspace(device):
    """One for all wrappers: their calls follow each other on one stream."""
    import torch
    return torch.empty(_WORKSPACE_BYTES if device.type == "cuda" else 1024, dtype=torch.uint8, device=device)


def _module(w, name: str, package: str):
    if w.device != _DEVICE:
        raise Unsupported(f"{name} needs a GPU, and NumPy arrays are on the CPU")
    try:
        return importlib.import_module(package)
    except Exception as error:  # an extension built for another PyTorch fails in its own ways
        raise Unsupported(f"{name}: {package} cannot be imported: {first_line(error)}") from error


def _checked(name: str, call):
    """`call`, which has run once."""
    try:
        call()
    except Exception as error:  # of head dims, page sizes and dtypes that a build lacks
        raise Unsupported(f"{name} cannot: {first_line(error)}") from error
    return call
