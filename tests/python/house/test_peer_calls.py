# SPDX-License-Identifier: Apache-2.0
"""What docs/migrating.md calls of other libraries binds to their signatures, as they were recorded from PyPI. Offline.
tessera's lines beside these run in test_house.py."""
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools" / "peers"))
import peer_calls  # noqa: E402

PAGE = peer_calls.PAGE.read_text()
RECORD = json.loads(peer_calls.RECORD.read_text())
KNOWN = peer_calls.known(RECORD)
PREFILL, DECODE = (f"flashinfer.Batch{which}WithPagedKVCacheWrapper" for which in ("Prefill", "Decode"))
TE = "transformer_engine.pytorch.DotProductAttention"


def test_every_call_binds():
    blocks = peer_calls.blocks(PAGE, RECORD)
    assert [line for block in blocks for line in block.wrong] == []
    assert set().union(*(block.called for block in blocks)) >= {
        "flashinfer.single_prefill_with_kv_cache", PREFILL, f"{PREFILL}.plan", f"{PREFILL}.run", DECODE,
        f"{DECODE}.plan", f"{DECODE}.run", "flashinfer.merge_state", "cudnn.pygraph", "cudnn.pygraph.sdpa",
        "cudnn.pygraph.sdpa_backward", TE, f"{TE}.forward", "flash_attn.flash_attn_func",
        "flash_attn_interface.flash_attn_func", "xformers.ops.memory_efficient_attention"}


def test_parameters_of_the_tables_exist():
    assert peer_calls.wrong_of_tables(PAGE, KNOWN) == []
    page = PAGE.replace("| `sink_token` |", "| `sink_tokens` |").replace("| `custom_mask` |", "| `mask=x` |")
    assert peer_calls.wrong_of_tables(page, KNOWN) == ["FlashInfer: mask is no parameter",
                                                       "`graph.sdpa`: sink_tokens is no parameter"]


@pytest.mark.parametrize("code, wrong", [
    ("# import flashinfer\n\n# o = flashinfer.merge_state(1, 2, 3)", "merge_state: missing a required argument: 's_b'"),
    ("# import flashinfer\n\n# o = flashinfer.merge(1)", "line 3: flashinfer.merge does not exist"),
    ("# o = flashinfer.merge_state(1, 2, 3, 4)", "line 1: flashinfer is not defined before"),
    ("# import flashinfer\n\n# o = flashinfer.merge_state(1, 2, 3, s)", "line 3: s is not defined before"),
    ("# import flashinfer\n\n# flashinfer.merge_state(1, 2, ...", "line 3 names another library and is no code"),
    ("# import cudnn\n\n# x = cudnn.data_type.FLOAT15", "cudnn.data_type.FLOAT15 does not exist"),
    ("# import cudnn\n# graph = cudnn.pygraph()\n\n# o = graph.sdpa(q=1, k=2, v=3, scale=4)",
     "line 4: cudnn.pygraph.sdpa: got an unexpected keyword argument 'scale'"),
    ("# from xformers.ops import BlockDiagonalMask", "xformers.ops.BlockDiagonalMask does not exist"),
    ("# from transformer_engine.pytorch import DotProductAttention\nDotProductAttention(4, 16, causal=True)",
     f"line 2: {TE}: got an unexpected keyword argument 'causal'"),
    ("# from transformer_engine.pytorch import DotProductAttention\na = DotProductAttention(4, 16)\na(layout='thd')",
     f"line 3: {TE}.forward: got an unexpected keyword argument 'layout'"),
])
def test_a_wrong_call_is_seen(code, wrong):
    found, = peer_calls.Block(code, KNOWN).wrong
    assert wrong in found


def test_prose_is_no_code():
    for prose in ("# causal", "# soft-capping", "# the same, but longer", "x = 1  # y = f(x)"):
        assert peer_calls.uncommented(prose) == (prose, set())
    assert peer_calls.uncommented("x = 1\n# f(a,\n#   b)      [s, h]\ny = 2") == ("x = 1\nf(a,\n  b)\ny = 2", {2, 3})
