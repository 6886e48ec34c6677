# SPDX-License-Identifier: Apache-2.0
"""Names and signatures of TransformerEngine's attention beside tessera.te's: those that were recorded from PyPI,
offline, and that PyPI still has them, where it can be reached."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools" / "peers"))
import te_names  # noqa: E402

RECORD = json.loads(te_names.RECORD.read_text())


def test_the_table_of_te_md_is_what_there_is():
    pytest.importorskip("flax")
    page = te_names.PAGE.read_text()
    assert te_names.with_table(page, RECORD) == page, "run python tools/peers/te_names.py --record"


def test_the_record_is_what_pypi_has(tmp_path):
    try:
        found = te_names.fetch(tmp_path, RECORD["version"])
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"PyPI's sources of transformer_engine {RECORD['version']} cannot be had: {error}")
    assert found == RECORD


def test_members_are_read_from_text():
    source = '''
@dataclass(eq=True)
class P:
    a: int
    b: tuple = (1, 2)
@dataclass(kw_only=True)
class K:
    a: int
class C(Base):
    def __init__(self, x, *, y=None): pass
    def forward(self, q, softcap: float = 0.0) -> None: pass
    @staticmethod
    def apply(x): pass
    @property
    def size(self): pass
    def _hidden(self): pass
def f(q, window_size=(-1, -1)): pass
'''
    assert te_names.members_of(source) == {
        "C": "x, *, y=None", "C.apply": "x", "C.forward": "q, softcap=0.0", "C.size": None,
        "K": "*, a", "P": "a, b=(1, 2)",
        "f": "q, window_size=(-1, -1)"}


@pytest.mark.parametrize("theirs, line", [
    ("query_layer=None, key_layer=None", None), ("key_layer=None, query_layer=None", "another place of key_layer"),
    ("query_layer=1", "query_layer=None for 1"), ("query_layer=None, colour=1", "without colour"),
    ("query_layer=None, *, qkv_interleave_dim=-3", None)])
def test_what_binds_otherwise_is_named(theirs, line):
    module, name = "pytorch.attention.dot_product_attention.dot_product_attention", "DotProductAttention.forward"
    expected = [f"{name}: {line}"] if line else []
    assert te_names.different(module, {name: theirs}) == expected
    assert te_names.missing(module, {name: theirs, "Nothing": None, "Nothing.forward": "x"}) == ["Nothing"]
