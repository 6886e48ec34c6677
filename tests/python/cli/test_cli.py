# SPDX-License-Identifier: Apache-2.0
"""The command line, as people run it: a process, its output, its exit code."""

import argparse
import ctypes
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tessera
from tessera import _lib
from tessera.__main__ import main
from tessera.cli import bench, bench_devices, case_lines, conformance, peers, work


def run(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "tessera", *map(str, arguments)],
                          capture_output=True, text=True, check=False, timeout=300, **options)


def lines_of(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_help_teaches():
    for command in ((), ("env",), ("explain",), ("mask",), ("check",), ("bench",)):
        text = "\n".join(lines_of(run(*command, "--help")))
        assert "example" in text and "python -m tessera" in text, command


def test_no_command_is_a_usage_error():
    done = run()
    assert done.returncode == 2 and "COMMAND" in done.stderr


def test_env():
    text = "\n".join(lines_of(run("env")))
    assert tessera.__version__ in text and np.__version__ in text
    facts = json.loads(run("env", "--json").stdout)
    assert facts["tessera"] == tessera.__version__
    assert {backend["name"] for backend in facts["build"]["backends"]} >= {"cpu", "reference"}
    assert isinstance(facts["gpus"], list) and facts["cpus"]["of this process"] >= 1


def test_env_without_nvidia_smi(tmp_path):
    done = run("env", "--json", env={"PATH": str(tmp_path), "PYTHONPATH": ":".join(sys.path)})
    assert json.loads(done.stdout)["gpus"] == []


def test_explain():
    text = "\n".join(lines_of(run("explain", "fwd bf16 b=2 s=1024 h=16 d=128 causal")))
    assert ": cpu" in text and all(name in text for name in tessera.backends())
    assert "this build has no" not in text  # CUDA, which would not help on a CPU
    refused = run("explain", "fwd fp64 b=1 s=8 h=1 d=8", "--json")
    answers = json.loads(refused.stdout)
    assert answers[0]["backend"] is None and answers[0]["suggestion"]["text"]
    assert refused.returncode == 1


def test_explain_of_a_gpu_that_is_not_here():
    """Rules and kernels of the CUDA backends are in every build, which tells where they are not."""
    built = next(backend for backend in json.loads(run("env", "--json").stdout)["build"]["backends"]
                 if backend["name"] == "cuda_sm90")
    not_built = "this build has no CUDA backend" in built["why_not"]
    done = run("explain", "fwd bf16 b=2 s=8192 h=16 d=128 causal",
               "fwd bf16 b=4 sq=4 sk=8192 hq=24 hk=4 d=128 max_logit", "fwd bf16 b=1 s=128 h=1 d=36",
               "--device", "sm90")
    for text in ("kernel: sm90/forward/d128_lean", "yields: sq=4: cuda_sm80 decodes up to 8 queries faster",
                 "kernel: sm80/stream/d128_rows32", "head_dim_qk=36: must be a multiple of 8",
                 "on sm90: cuda_sm90 (kernel sm90/forward/d128_lean)" + ", not in this build" * not_built):
        assert text in done.stdout, done.stdout
    assert done.returncode == 0
    assert "this build has no CUDA backend" not in done.stdout and "TESSERA_CUDA" not in done.stdout
    found = lines_of(run("explain", "fwd bf16 b=2 s=1024 h=16 d=128 causal dropout=0.1", "--device", "sm90"))
    assert found[0].endswith("on sm90: cuda_sm90 (kernel sm90/forward/d128_dropout)" +
                             ", not in this build" * not_built)
    assert ("install the wheel" in "".join(found)) == not_built


def test_a_refusal_on_the_cpu_is_about_the_cpu():
    """What GPUs could do is one line of it, and the last."""
    with pytest.raises(tessera.Refused) as refused:
        tessera.attention(*[np.zeros((1, 4, 1, 8))] * 3)
    lines = str(refused.value).splitlines()
    assert lines[1].startswith("  cpu: ") and lines[2].startswith("  reference: "), lines
    assert lines[3].startswith("  cuda_sm90, cudnn, cuda_sm80: ") and lines[4].startswith("repro: ") and len(lines) == 5


def test_explain_takes_words():
    text = lines_of(run("explain", "fwd", "fp32", "b=1", "s=8", "h=1", "d=8", "bwd", "bf16", "b=1",
                        "s=8", "h=1", "d=8", "--json"))
    assert [answer["case"][:8] for answer in json.loads("\n".join(text))] == ["fwd fp32",
                                                                             "bwd bf16"]


@pytest.mark.parametrize("command", ["explain", "check", "bench"])
@pytest.mark.parametrize("case", ["fwd fp32 b=1 s=8 h=1 d=8 causl", "nonsense", "fwd fp32 b=1 b=2",
                                  "fwd fp32 b=1 sq=4 sk=8 h=1 d=8 causal"])
def test_illegal_case(command, case):
    done = run(command, case)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "FAIL" in done.stdout if command == "check" else "tessera." in done.stderr + done.stdout


@pytest.mark.parametrize("through", ["numpy", "c"])
def test_check_passes(through):
    done = run("check", "fwd fp32 b=1 s=33 h=2 d=16 causal",
               "bwd bf16 b=2 s=20 hq=4 hk=2 d=16 layout=thd lens=random:3 gaps=2 poison",
               "--through", through)
    assert lines_of(done)[-1] == "2 passed, 0 refused, 0 failed"


def test_check_options():
    case = "bwd fp32 b=1 s=40 h=2 d=24 window=8,0 bias=post grads=dbias out"
    for options in (("--backend", "reference"), ("--threads", "1"), ("--isa", "portable"),
                    ("--isa", "avx2", "--through", "c", "--threads", "2")):
        assert lines_of(run("check", case, *options))[-1] == "1 passed, 0 refused, 0 failed"


def test_check_refusals(tmp_path):
    refused, runs = "fwd fp64 b=1 s=8 h=1 d=8", "fwd fp32 b=1 s=8 h=1 d=8"
    rules = tmp_path / "refused"
    rules.write_text("# known\nfp64  # no kernels\n")
    cases = tmp_path / "two.cases"
    cases.write_text(f"{runs}\n\n{refused}   # comment\n")
    done = run("check", "--cases", cases, "--refused", rules, "--backend", "cpu")
    assert lines_of(done)[-1] == "1 passed, 1 refused, 0 failed"
    rules.write_text("fp32 d=[1-8]")
    done = run("check", "--cases", cases, "--refused", rules, "--backend", "cpu")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "0 passed, 0 refused, 2 failed"
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAIL ")]
    assert f'FAIL python -m tessera check "{runs}" --backend cpu  # runs, and' in failures[0]
    assert failures[0].endswith("must be refused by: fp32 d=[1-8]")
    assert "no rule says so" in failures[1] and "fp64" in failures[1]


def test_check_takes_the_cases_of_a_kernel():
    from tessera.cli import check
    args = argparse.Namespace(device="cuda", backend="cuda_sm80")
    assert check.kernels_of("fwd bf16 b=2 s=8192 h=16 d=128 causal", args) == ["sm80/forward/d128_lean"]
    assert check.kernels_of("fwd fp64 b=2 s=64 h=1 d=64", args) == []
    none = run("check", "fwd fp32 b=1 s=8 h=1 d=8", "--kernel", "sm90/*")
    assert none.returncode != 0 and "none of these cases runs in such a kernel" in none.stderr


def test_rules_of_refusals():
    from tessera.cli import case_lines, check
    case = "bwd bf16 b=1 s=17 h=2 d=40 layout=thd keep=random:0.5/bq poison"
    for rule in ("bf16", "poison bwd", "d=*0 s=[1-9]*", "keep=*/* !keep=*qk", "!strided"):
        assert check.holds(rule, case), rule
    for rule in ("fwd", "bf16 d=4", "d=[13579]*1", "bwd s=[1-9]", "!layout=t*", "keep=*/* !keep=*q"):
        assert not check.holds(rule, case), rule
    cases = case_lines.read("smoke") + case_lines.read("ci")
    for backend in ("reference", "cpu", "cuda", "cuda_sm90"):
        rules = case_lines.read(case_lines.find(f"refused.{backend}"))
        idle = [rule for rule in rules if not any(check.holds(rule, case) for case in cases)]
        # A case listed by name is spelled as the library spells it, which the files need not do.
        assert rules and all(rule.startswith(("fwd ", "bwd ")) and " b=" in rule for rule in idle), idle


@pytest.mark.parametrize("device, forced", [("sm80", ["cuda_sm80"]), ("sm90", ["cuda_sm80", "cuda_sm90"])])
def test_rules_of_gpus_are_what_explain_says(device, forced):
    """Rules of CUDA backends are in every build: what a GPU refuses of smoke and ci is known without one."""
    from tessera.cli import case_lines, check, conformance
    rules = {name: check.refusals(name) for name in ("cuda", *forced)}

    def wrong(case):
        answer = tessera.explain(case, device=device).answer
        reasons = {entry["name"]: [reason["text"] for reason in entry["reasons"] if reason["id"] != "not_built"]
                   for entry in answer["backends"]}
        reasons["cuda"] = [] if any(not reasons[name] for name in forced) else sum((reasons[x] for x in forced), [])
        held = {name: [rule for rule in own if check.holds(rule, case)] for name, own in rules.items()}
        return [(name, case, held[name], reasons[name]) for name in rules if bool(held[name]) != bool(reasons[name])]

    cases = [case for case in case_lines.read("smoke") + case_lines.read("ci") if wrong(case)]
    for i, case in enumerate(cases):  # rules are of the library's spelling, which the files need not have
        with conformance.Case(case) as spelled:
            cases[i] = spelled.text
    assert not [line for case in cases for line in wrong(case)]
    assert wrong("fwd fp64 b=1 s=8 h=1 d=8") == []
    rules["cuda"] = []
    assert [name for name, *_ in wrong("fwd fp64 b=1 s=8 h=1 d=8")] == ["cuda"]


def test_check_sees_wrong_results():
    """A front end that answers nonsense fails, each with a line to paste."""
    from tessera.cli import check, conformance

    def wrong(case):
        check.through_numpy(case, None)
        output = next(iter(case.group("outputs").values()))
        output[...] = output + np.asarray(0.5, output.dtype)

    for case in ("fwd fp32 b=1 s=33 h=2 d=16", "bwd bf16 b=1 s=33 h=2 d=16"):
        outcome, why, _ = check.judge(case, wrong)
        assert outcome == "failed" and "error" in why
    outcome, why, _ = check.judge("fwd fp32 b=1 s=33 h=2 d=16", conformance.Case.poison_outputs)
    assert outcome == "failed" and why


def test_check_without_a_front_end():
    done = run("check", "fwd fp32 b=1 s=8 h=1 d=8", "--through", "paddle")
    assert done.returncode == 2 and "paddle" in done.stderr and "Traceback" not in done.stderr


def test_missing_file():
    done = run("check", "--cases", "no/such/file")
    assert done.returncode == 2 and "no/such/file" in done.stderr


def test_bench_json(tmp_path):
    path = tmp_path / "out.json"
    done = run("bench", "fwd fp32 b=1 s=64 h=2 d=32 causal",
               "bwd bf16 b=1 s=32 h=2 d=32 bias=post grads=dbias dlse", "--against", "numpy,cudnn",
               "--burst", "--json", path)
    text = lines_of(done)
    assert text[0].split()[:2] == ["case", "ms"]
    results = json.loads(path.read_text())
    assert [result["pass"] for result in results] == ["fwd", "bwd"]
    for result in results:
        assert set(result) == {"case", "pass", "backend", "kernel", "device", "threads", "ms", "min_ms",
                               "flop", "tflops", "percent_of_peak", "bytes_per_s", "percent_of_bandwidth",
                               "copies", "byte_rule_ms", "within_byte_rule", "peers", "machine", "date", "command",
                               "version"}
        assert result["backend"] == "cpu" and 0 < result["percent_of_peak"] < 200
        assert set(result["peers"]["numpy"]) == {"ms", "min_ms", "tflops", "times"}
        assert "GPU" in result["peers"]["cudnn"]["refused"]
    done = run("bench", "fwd fp32 b=1 s=16 h=1 d=16", "--threads", "1", "--json", "-")  # no mode
    assert json.loads(done.stdout)[0]["ms"] > 0


def test_bench_without_ml_dtypes(monkeypatch, capsys):
    """As in a clean wheel: bf16 and fp8 are timed all the same, as bits; a peer says what it lacks."""
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    peers_of = ["numpy"] + ["torch"] * (importlib.util.find_spec("torch") is not None)
    cases = ["fwd bf16 b=1 s=32 h=2 d=32 causal", "fwd bf16 b=1 s=32 h=2 d=32 alibi",
             "bwd bf16 b=1 s=32 h=2 d=32 bias=post grads=dbias dlse", "fwd bf16 b=1 s=32 h=1 d=32 kv=e4m3"]
    assert main(["bench", *cases, "--quick", "--against", ",".join(peers_of), "--json", "-"]) == 0
    results = json.loads(capsys.readouterr().out)
    for result in results:
        assert result.get("ms", 0) > 0 and 0 < result["percent_of_peak"] < 200, result
        assert "pip install ml_dtypes" in result["peers"]["numpy"]["refused"]
    if "torch" in peers_of:
        assert results[0]["peers"]["torch"]["ms"] > 0 and results[2]["peers"]["torch"]["ms"] > 0
        assert "pip install ml_dtypes" in results[1]["peers"]["torch"]["refused"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_bench_keeps_what_it_has_when_stopped(tmp_path, number):
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "tessera", "bench", "--sustained", "--json", str(path),
               *["fwd fp32 b=1 s=16 h=1 d=16"] * 2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        lines = [child.stdout.readline(), child.stdout.readline()]  # headings, and the first row
        child.send_signal(number)
        rest, said = child.communicate(timeout=120)
    assert lines[1].startswith("fwd fp32") and rest == "", lines
    assert child.returncode == 128 + number and "1 of 2 cases" in said and "Traceback" not in said
    assert len(json.loads(path.read_text())) == 1


def test_bench_outlives_a_peer_that_fails(monkeypatch, capsys):
    def fail():
        raise RuntimeError("cannot be captured\nand so on")
    monkeypatch.setitem(peers.PEERS, "numpy", lambda workload: fail)
    assert main(["bench", "fwd fp32 b=1 s=16 h=1 d=16", "--quick", "--against", "numpy",
                 "--json", "-"]) == 0
    result, = json.loads(capsys.readouterr().out)
    assert result["ms"] > 0
    assert result["peers"]["numpy"] == {"refused": "numpy failed: cannot be captured"}


def test_what_peers_without_our_keywords_are_given(monkeypatch):
    from tessera.cli.peers import workload
    with conformance.Case("fwd bf16 b=2 s=16 h=3 d=8 window=3,0 layout=sbhd", as_bits=True) as case:
        given = case.arguments()
        q, k, v = (given.pop(name) for name in "qkv")
        w = peers.Workload(q, k, v, None, given, None)
        plain_q = workload.plain(w, "a peer")[0]
        assert plain_q.dtype == q.dtype and plain_q.flags.c_contiguous
        assert np.array_equal(plain_q.view(np.uint16), q.view(np.uint16).transpose(1, 2, 0, 3))
        mask = workload.dense_mask(w, 2, 3, 16, 16)
        i, j = np.arange(16)[:, None], np.arange(16)
        assert np.array_equal(np.broadcast_to(mask, (1, 3, 16, 16))[0, 0], (j <= i) & (j >= i - 3))
        monkeypatch.setattr(workload, "_LARGEST_MASK", 255)
        with pytest.raises(peers.Unsupported, match="dense mask"):
            workload.dense_mask(w, 2, 3, 16, 16)


def test_bench_takes_tensors_by_turns_where_memory_is_the_limit():
    """A stand-in for a GPU: a decode gets as many copies as the device asks for, a square problem one."""
    class Device(bench_devices.Cpu):
        def copies(self, read):
            return 3

        def byte_rule(self, read, bytes_per_s, share):
            assert share == 0.95
            return 5e-6 + read / bytes_per_s

    args = argparse.Namespace(backend=None, threads=None, mode="quick")
    for case, copies in (("fwd fp32 b=1 sq=1 sk=512 h=1 d=16", 3), ("fwd fp32 b=1 s=256 h=1 d=64", 1)):
        opened = conformance.Case(case)
        entry = bench.measure(case, opened, ["numpy"], Device(None), args)
        assert entry["copies"] == copies, entry
        assert (entry["byte_rule_ms"] or 0) > 0.005 if copies > 1 else entry["byte_rule_ms"] is None
        assert entry["within_byte_rule"] == (entry["ms"] <= entry["byte_rule_ms"] if copies > 1 else None)
        assert entry["peers"]["numpy"]["ms"] > 0
    taken = []
    call = bench_devices.in_turn([lambda n=n: taken.append(n) for n in range(3)])
    for _ in range(7):
        call()
    assert taken == [0, 1, 2, 0, 1, 2, 0]


def test_bench_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    saved = tmp_path / "saved.json"
    lines_of(run("bench", "fwd fp32 b=1 s=16 h=1 d=16", "fwd fp32 b=1 sq=1 sk=256 h=1 d=16", "--burst",
                 "--against", "numpy", "--json", saved, "--plot", path))
    assert path.read_bytes()[:4] == b"\x89PNG"
    entry = json.loads(saved.read_text())[1]
    assert entry["percent_of_bandwidth"] > 0
    assert "threads" in entry["machine"] and entry["date"].startswith("20")
    assert entry["command"].startswith("python -m tessera bench 'fwd fp32 b=1 s=16 h=1 d=16'")
    for kind in ("roofline", "ratio", "scaling", "bytes"):
        drawn = tmp_path / f"{kind}.png"
        lines_of(run("bench", "--from", saved, "--plot", drawn, "--plot-as", kind))
        assert drawn.read_bytes()[:4] == b"\x89PNG", kind
    done = run("bench", "--from", tmp_path / "none.json", "--plot", path)
    assert done.returncode == 2 and "none.json" in done.stderr
    first, second = json.loads(saved.read_text())
    del second["percent_of_peak"]
    saved.write_text(json.dumps([first, second]))
    lines_of(run("bench", "--from", saved, "--plot", tmp_path / "roof.png", "--plot-as", "roofline"))
    saved.write_text(json.dumps([second]))
    done = run("bench", "--from", saved, "--plot", path, "--plot-as", "roofline")
    assert done.returncode == 2 and "no case of fp32 has percent_of_peak" in done.stderr
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["ratio cpu", "roofline cpu", "ratio hopper", "bytes decode"])
def test_bench_draws_what_the_pages_show(tmp_path, kind):
    pytest.importorskip("matplotlib")
    kind, name = kind.split()
    saved = Path(__file__).resolve().parents[3] / "docs" / "data" / f"{name}.json"
    lines_of(run("bench", "--from", saved, "--plot", tmp_path / "plot.png", "--plot-as", kind))
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_bench_usage():
    assert run("bench").returncode == 2
    done = run("bench", "fwd fp32 b=1 s=16 h=1 d=16", "--against", "nobody")
    assert done.returncode == 2 and "torch" in done.stderr


def test_bench_against_a_library_without_a_gpu(tmp_path):
    done = run("bench", "fwd bf16 b=1 s=16 h=1 d=64", "--quick", "--against", f"fa3:{tmp_path}/fa3.so", "--json", "-")
    result, = json.loads(done.stdout)
    refused = next(iter(result["peers"].values()))["refused"]
    assert result["ms"] > 0 and ("CUDA" in refused or "torch" in refused)


def test_bench_against_another_build(tmp_path):
    torch = pytest.importorskip("torch")
    from tessera import _lib
    other = shutil.copy(_lib.lib._name, tmp_path / "other.so")
    done = run("bench", "fwd bf16 b=1 s=40 h=2 d=32 causal", "fwd fp32 b=2 s=33 h=2 d=16 layout=thd lens=random:1",
               "bwd fp32 b=1 s=32 hq=4 hk=2 d=32 bias=post grads=dbias dlse", "--quick", "--against",
               f"build:{other}", "--json", "-")
    for result in json.loads(done.stdout):
        assert result["peers"][f"build:{other}"].get("times", 0) > 0, result
    from tessera.cli.peers.other_build import given_to_ours
    for device, keywords, order in (("cuda", {}, False), ("cuda", {"deterministic": True}, True), ("cpu", {}, None)):
        workload = peers.Workload(None, None, None, None, keywords, None, device)
        assert given_to_ours(workload, torch).get("deterministic") is order
    nothing = tmp_path / "nothing.so"
    done = run("bench", "fwd fp32 b=1 s=16 h=1 d=16", "--quick", "--against", f"build:{nothing}", "--json", "-")
    result, = json.loads(done.stdout)
    assert result["ms"] > 0 and "nothing.so" in result["peers"][f"build:{nothing}"]["refused"]


@pytest.mark.parametrize("suite", ["cpu", "te", "features", "scaling", "tail"])
def test_suites_are_legal(suite):
    from tessera.cli import bench
    cases = case_lines.read(bench._SUITES / f"{suite}.cases")
    assert len(cases) >= 8
    for case in cases:
        assert tessera.explain(case).backend == "cpu", case


def test_demo_is_dispatched():
    assert "demo" in "\n".join(lines_of(run("demo", "--help")))


def test_visible_scores_against_the_oracle():
    """What bench calls useful work is what the oracle sees."""
    import problems
    from hypothesis import HealthCheck, given, settings

    @settings(max_examples=150, deadline=None, derandomize=True,
              suppress_health_check=list(HealthCheck))
    @given(problems.problems())
    def check(problem):
        truth = problem.oracle()
        seen = sum(int(truth._sequence(n)[-1].sum()) for n in range(truth.batch))
        assert work.visible_scores(problem.q, problem.k, problem.v, problem.keywords) == seen
    check()


def test_the_reference_lies_beside_the_library(tmp_path):
    """Forced by name it is loaded from there; without the file it is refused, and says which."""
    library = Path(_lib.lib._name).resolve()
    alone = tmp_path / "libtessera.so"
    alone.write_bytes(library.read_bytes())
    other = ctypes.CDLL(str(alone))
    other.tessera_prepare.argtypes = _lib.prepare.argtypes
    with conformance.Case("fwd fp64 b=1 s=5 h=1 d=8") as case:
        case.problem.backend = b"reference"
        error = _lib.error_of_thread()
        arguments = (ctypes.addressof(case.problem), _lib.CPU_ADDRESS, 1, None,
                     ctypes.addressof(error))
        assert other.tessera_prepare(*arguments) == _lib.REFUSED
        assert b"libtessera_check.so is not there" in error.message
        assert _lib.prepare(*arguments) == _lib.OK
