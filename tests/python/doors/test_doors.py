# SPDX-License-Identifier: Apache-2.0
"""The list of doors: what `python -m tessera env` says of each, and that it is true."""
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tessera import doors

ROOT = Path(__file__).resolve().parents[3]


def test_tested_versions_are_those_of_the_tests():
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "tests" / "versions.txt").read_text(), re.M))
    tested = {door.for_cpus or door.host: door.tested for door in doors.DOORS.values() if not door.stand_in}
    assert tested.items() <= pins.items()


def test_every_door_is_a_module_and_in_the_table_of_docs():
    page = (ROOT / "docs" / "integrations.md").read_text()
    for name, door in doors.DOORS.items():
        path = ROOT / "python" / door.module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), name
        assert f"| {name} |" in page and door.tested in page, name


def test_every_door_has_an_example_or_is_one_line():
    rows = re.findall(r"^\| ([^|]+) \| .* \| (?:\[.*\]\(\.\./(\S+)\)|the line is all) \|$",
                      (ROOT / "docs" / "integrations.md").read_text(), re.M)
    examples = {name: path for name, path in rows if path}
    assert {name for name, _ in rows} == set(doors.DOORS)
    assert set(doors.DOORS) - set(examples) == {"TransformerEngine", "SGLang", "axolotl", "torchtitan"}
    assert set(examples.values()) == {"examples/comfyui/__init__.py", *(
        path.relative_to(ROOT).as_posix() for path in (ROOT / "examples" / "doors").glob("*.py"))}


def test_env_lists_them():
    done = subprocess.run([sys.executable, "-m", "tessera", "env", "--json"], capture_output=True, text=True,
                          check=True)
    assert json.loads(done.stdout)["doors"] == doors.states()


@pytest.mark.parametrize("found, says", [
    ("1.2.3", "host 1.2.3, tested"), ("1.2.3+cu126", "host 1.2.3+cu126, tested"),
    ("1.3.0", "host 1.3.0, not tested; 1.2.3 was"), (None, "host is not installed")])
def test_states(monkeypatch, found, says):
    def version(name):
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert doors.state(doors.Door("host", "1.2.3", "", "")) == says


def test_a_host_for_cpus_is_the_host(monkeypatch):
    def version(name):
        if name == "host":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2.3"
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert doors.state(doors.Door("host", "1.2.3", "", "", for_cpus="host-cpu")) == "host-cpu 1.2.3, tested"


def test_a_stand_in_is_no_host(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2.3")
    assert doors.state(doors.Door("host", "1.2.3", "", "", True)) == "host 1.2.3, tested by a stand-in of its interface"


def test_importing_tessera_imports_no_host():
    names = ("vllm", "sglang", "maxtext", "diffusers", "megatron", "transformer_engine", "xfuser", "comfy", "trl",
             "kernels", "transformers", "torchtitan", "deepspeed")
    code = f"import sys, tessera, tessera.doors; print([name for name in {names} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
