# SPDX-License-Identifier: Apache-2.0
"""Names and signatures of flash-attn and xformers, as they were recorded from PyPI, beside ours. Offline."""
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools" / "peers"))
import peer_names  # noqa: E402

RECORD = json.loads(peer_names.RECORD.read_text())


def test_the_table_of_migrating_is_what_there_is():
    page = peer_names.PAGE.read_text()
    assert peer_names.with_table(page, RECORD) == page, "run python tools/peers/peer_names.py --record"


@pytest.mark.parametrize("module", peer_names.MODULES)
def test_parameters_begin_with_theirs(module):
    assert peer_names.different(module, RECORD[module]["names"]) == []


def test_functions_of_attention_are_all_here():
    absent = {name for module, found in RECORD.items() for name in peer_names.missing(module, found["names"])}
    assert not {name for name in absent if name.startswith(("flash_attn_", "memory_efficient"))} - {"flash_attn_3_cuda"}


def test_names_are_read_from_text():
    source = '''
from other import a, b
import torch
def f(x: int, *, y: "T" = (-1, -1), **more) -> None: pass
def _hidden(): pass
def _flash_attn_forward(q): pass
class C: pass
D = 1
'''
    assert peer_names.names_of(source) == {"f": "x, *, y=(-1, -1), **more", "_flash_attn_forward": "q", "C": None,
                                           "D": None}
    assert peer_names.names_of("from .x import f\n__version__ = '1'\n") == {"__version__": None, "f": None}
    assert peer_names.names_of("from .x import f\ndef g(): pass\n__all__ = ['f']") == {"f": None}


def test_what_differs_is_named():
    names = {"flash_attn_func": "q, k, v, colour=1", "flash_attn_with_kvcache": "q, k_cache, v_cache", "nothing": "x"}
    line, = peer_names.different("flash_attn", names)
    assert line.startswith("flash_attn_func: theirs (q, k, v, colour=1), ours (q, k, v, dropout_p=0.0")
    assert peer_names.missing("flash_attn", names) == ["nothing"]
