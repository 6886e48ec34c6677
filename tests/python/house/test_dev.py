# SPDX-License-Identifier: Apache-2.0
"""./dev tells of every command and lists every example; the site's reference is what real frameworks would make."""

import ast
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def dev(*arguments):
    return subprocess.run([ROOT / "dev", *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


def test_usage_lists_every_command():
    commands = re.findall(r"^  ([a-z]+)\)", (ROOT / "dev").read_text().split("\ncase $command in\n")[1], re.MULTILINE)
    assert {"demo", "example", "test"} < set(commands)
    assert set(re.findall(r"^  ([a-z]+) ", dev("help"), re.MULTILINE)) == set(commands)


def imported(program: Path, functions: bool = True) -> set[str]:
    """Packages that a program imports, in its functions too, and modules beside it as they are imported."""
    found: set[str] = set()
    tree = ast.parse(program.read_text())
    for node in ast.walk(tree) if functions else tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else \
            [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            beside = program.with_name(f"{name}.py")
            found |= imported(beside, functions=False) if beside.exists() else {name.partition(".")[0]}
    return found


def test_each_example_is_listed_with_what_it_needs():
    listed = dict(re.findall(r"^  (\S+) .*; needs (.*)$", dev("example"), re.MULTILINE))
    programs = {path for path in (ROOT / "examples").rglob("*.*") if path.suffix in (".c", ".cc") or
                path.suffix == ".py" and re.search("__main__", path.name + path.read_text())}
    names = {path.relative_to(ROOT / "examples").with_suffix("").as_posix().removesuffix("/__main__"): path
             for path in programs}
    assert set(listed) == set(names)
    for name, path in names.items():
        if path.suffix == ".py":
            asked = imported(path) & {"torch", "jax", "paddle", "matplotlib", "accelerate", "deepspeed", "diffusers",
                                      "kernels", "megatron", "trl", "vllm", "xfuser"}
            assert set(listed[name].split(", ")) == asked, f"{name} imports {asked}"


def test_an_unknown_example_is_refused():
    done = subprocess.run([ROOT / "dev", "example", "torch/none"], capture_output=True, text=True)
    assert done.returncode == 1 and "torch/none: no such example" in done.stderr


def test_a_wheel_for_an_unknown_platform_is_refused():
    done = subprocess.run([ROOT / "dev", "wheel", "--platform", "riscv64"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "wheel --platform riscv64: takes --cpu, --platform aarch64 or nothing" in done.stderr


@pytest.mark.parametrize("asked, ran", [
    ("", ["all"]), ("core", ["core"]), ("python docs", ["python", "docs"]),
    ("core cpu -R mask", ["core -R mask", "cpu -R mask"]), ("asan core", ["asan", "core"]),
    ("aarch64 core", ["aarch64", "aarch64_wheel", "core"])])
def test_each_named_stage_runs(asked, ran):
    stages = "all core cpu python docs aarch64 aarch64_wheel"
    instead = "".join(f'test_{name}() {{ echo {name} "$@"; }}; ' for name in stages.split())
    script = f'set -- help; . ./dev >/dev/null; {instead} test_sanitizer() {{ echo "$@"; }}; tests {asked}'
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ran


# Stand-ins for what a machine with a GPU has, which say what they were asked.
DEVICE_PROGRAMS = {
    "bin/nvidia-smi": "echo a GPU, 580",
    "bin/python3": 'case "$*" in *env) echo "build.backends.cudnn.available  $CUDNN" ;; *) exit 1 ;; esac',
    "build/cuda/tests/conformance/tessera_check_cases": 'echo "cases $*"; case "$*" in *"$BROKEN"*) exit 1 ;; esac',
    "build/cuda/tests/cuda/tessera_cuda_properties": 'echo "properties $*"',
    "build/cuda/tests/nvte/nvte_gpu_test": "echo nvte",
}


@pytest.fixture
def device_check(tmp_path):
    """device_check(STAGE..., NAME=VALUE...): the script in a folder whose programs are stand-ins."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/device_check.sh", tmp_path / "tools")
    for name, text in DEVICE_PROGRAMS.items():
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)

    def run(*stages, **environment):
        return subprocess.run(
            [tmp_path / "tools/device_check.sh", *stages], capture_output=True, text=True, timeout=60,
            env={"CUDNN": "True", "BROKEN": "no such backend", "OUT": str(tmp_path),
                 "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **environment})
    return run


def test_a_device_check_packs_a_log_for_each_stage(device_check, tmp_path):
    done = device_check("cases", "properties")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("== 0 commands failed\n")
    backends = re.findall(r"^cases .* --threads 0 ?(.*)", done.stdout, re.MULTILINE)
    assert backends == ["", "--backend cuda_sm90", "--backend cuda_sm80", "--backend cudnn"]
    with tarfile.open(tmp_path / "device_check.tar.gz") as packed:
        logs = {name: packed.extractfile(f"device_check/{name}.log").read().decode()
                for name in ("cases", "properties")}
    assert "--backend cudnn" in logs["cases"] and "nvte" in logs["properties"]
    assert all(log in done.stdout for log in logs.values())


def test_a_device_check_counts_what_fails_and_goes_on(device_check):
    done = device_check("cases", "properties", BROKEN="cuda_sm90", CUDNN="False")
    assert done.returncode == 1
    assert done.stdout.endswith("== 1 commands failed\n")
    assert "FAILED (1): build/cuda/tests/conformance/tessera_check_cases" in done.stdout
    assert "cudnn: unavailable" in done.stdout and "nvte" in done.stdout


@pytest.mark.parametrize("stage", ["allocators", "jax"])
def test_a_device_check_says_what_it_lacks(device_check, stage):
    done = device_check(stage)
    assert done.returncode == 0 and "unavailable" in done.stdout


def test_a_device_check_of_an_unknown_stage_is_refused(device_check):
    done = device_check("cases", "chaoss")
    assert done.returncode == 2 and "no stage chaoss; must be one of build cases" in done.stdout


def test_an_unknown_stage_is_refused():
    done = subprocess.run([ROOT / "dev", "test", "pyhton"], capture_output=True, text=True)
    assert done.returncode == 1 and "test pyhton: must be of all core cpu python" in done.stderr


def test_the_demo_takes_a_wheel_where_one_lies(tmp_path):
    script = f'set -- help; . {ROOT}/dev >/dev/null; root={tmp_path}; cd $root; '
    script += 'use_wheel && echo "$PYTHONPATH" || echo none'

    def used():
        done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    folder = tmp_path / "build" / "dist" / "cpu"
    folder.mkdir(parents=True)
    wheel = f"tessera_attention-0.1.0-py3-none-manylinux_2_34_{os.uname().machine}.whl"
    with zipfile.ZipFile(folder / wheel.replace(os.uname().machine, "other"), "w") as other:
        other.writestr("tessera/__init__.py", "")
    assert used() == "none"
    with zipfile.ZipFile(folder / wheel, "w") as ours:
        ours.writestr("tessera/__init__.py", "")
    assert used() == str(tmp_path / "build" / "wheel-of-demo")
    assert (tmp_path / "build" / "wheel-of-demo" / "tessera" / "__init__.py").exists()


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
