# SPDX-License-Identifier: Apache-2.0
"""The site's reference is what real frameworks would make."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PAGES = ("torch", "hf", "flash_attn", "xformers")
MADE = f"""
import json, sys
import reference
pages = {{name: reference._front_end(*reference._FRONT_ENDS[name]) for name in {PAGES}}}
assert sys.modules["torch"].__version__ == "999.0"
print(json.dumps(pages))
"""


def test_reference_is_the_same_without_frameworks(monkeypatch):
    pytest.importorskip("transformers")
    places = [str(ROOT / "tools" / "site"), str(ROOT / "python")]
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {places}{MADE}"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(places[0])
    import reference
    import stand_ins

    monkeypatch.setattr(stand_ins, "frameworks", contextlib.nullcontext)
    for name, page in json.loads(done.stdout).items():
        assert page == reference._front_end(*reference._FRONT_ENDS[name]), name
