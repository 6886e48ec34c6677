# SPDX-License-Identifier: Apache-2.0
"""The conformance cases through tessera.paddle, and what the command line says of Paddle."""

import types

import pytest

paddle = pytest.importorskip("paddle")

from tessera.__main__ import main  # noqa: E402
from tessera.cli import case_lines, check, peers  # noqa: E402
from tessera.cli.through import paddle as conformance  # noqa: E402

CASES = {"smoke": 1, "ci": 40}  # one in so many; `python -m tessera check --through paddle` runs all


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    run = conformance.runner(types.SimpleNamespace(threads=None, device="cpu", backend=None))
    rules = check.refusals("cpu", "paddle")
    failures = []
    for case in case_lines.read(name)[::CASES[name]]:
        outcome, why, canonical = check.judge(case, run)
        expected = "refused" if any(check.holds(rule, canonical) for rule in rules) else "passed"
        if outcome != expected:
            failures.append(f"{case}  # {outcome}: {why}")
    assert not failures, "\n".join(failures)


def test_check_through_paddle(capsys):
    assert main(["check", "--through", "paddle", "bwd fp32 b=1 s=9 h=2 d=8 causal out"]) == 0
    assert "1 passed" in capsys.readouterr().out
    if not paddle.is_compiled_with_cuda():
        assert main(["check", "--through", "paddle", "--device", "cuda"]) == 2
        assert "without CUDA" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["fwd fp32 b=1 s=16 hq=4 hk=2 d=8 causal",
                                  "bwd fp32 b=1 s=16 h=2 d=8 bias=post window=4,0 grads=dbias"])
def test_bench_against_paddle(case, tmp_path):
    file = tmp_path / "result.json"
    assert main(["bench", case, "--against", "paddle", "--quick", "--json", str(file)]) == 0
    entry, = __import__("json").loads(file.read_text())
    assert entry["peers"]["paddle"]["ms"] > 0


def test_the_peer_computes_what_we_do():
    """Its forward pass beside a case's reference."""
    from tessera.cli import conformance as cases
    with cases.Case("fwd fp32 b=2 sq=9 sk=14 hq=4 hk=2 d=8 window=5,2 align=top_left bias=post") as case:
        arguments = case.arguments()
        q, k, v = (arguments.pop(name) for name in "qkv")
        run = peers.prepare("paddle", peers.Workload(q, k, v, None, arguments, None))
        case.group("outputs")["o"][...] = run().numpy()
        error = case.compare()["outputs"]["o"]
        assert error["max_err"] <= error["max_limit"]


@pytest.mark.parametrize("case, why", [("fwd bf16 b=1 s=8 h=1 d=8", "16-bit"),
                                       ("fwd fp32 b=1 s=8 h=1 d=8 softcap=3", "softcap")])
def test_what_the_peer_cannot(case, why):
    from tessera.cli import conformance as cases
    with cases.Case(case) as opened:
        arguments = opened.arguments()
        q, k, v = (arguments.pop(name) for name in "qkv")
        with pytest.raises(peers.Unsupported, match=why):
            peers.prepare("paddle", peers.Workload(q, k, v, None, arguments, None))
