# SPDX-License-Identifier: Apache-2.0
"""bench --suite sweep: what is drawn, what is kept, and what is said of the results."""

from __future__ import annotations

import collections
import importlib.util
import json
import math
import subprocess
import sys
import time

import pytest

import tessera
from tessera.__main__ import main
from tessera.cli import bench, case_lines, plot, sweep

# Of seed 0. A change of the draw or of the models changes them, and makes older files another list.
FIRST = {"cuda": ["fwd bf16 b=1 sq=256 sk=24128 h=10 dqk=96 dv=64 causal align=bottom_right",
                  "bwd bf16 b=887 s=197 h=2 d=64"],
         "cpu": ["fwd bf16 b=1 sq=16 sk=1508 h=5 dqk=96 dv=64 causal align=bottom_right",
                 "bwd bf16 b=22 s=197 h=2 d=64"]}
SHAPES = {device: sweep.shapes(300, 0, device) for device in sweep.LIMITS}


def lines(device: str) -> list[str]:
    return [shape.case for shape in SHAPES[device]]


# ---- what is drawn ----

@pytest.mark.parametrize("device", sweep.LIMITS)
def test_a_seed_is_a_list(device):
    assert len(set(lines(device))) == 300
    assert sweep.shapes(300, 0, device) == SHAPES[device]
    assert sweep.shapes(100, 0, device) == SHAPES[device][:100]
    others = {shape.case for shape in sweep.shapes(300, 1, device)}
    assert len(others & set(lines(device))) < 100


def test_the_draw_stays_as_it_is():
    """A list that is measured on one machine and one version of Python is that of every other."""
    assert lines("cuda")[:2] == FIRST["cuda"] and lines("cpu")[:2] == FIRST["cpu"]


def test_models_are_many_and_their_figures_have_a_source():
    models = sweep.models()
    sources = json.loads(sweep._MODELS.read_text())["sources"]
    assert len(models) == len({model["model"] for model in models}) >= 100
    assert len({model["family"] for model in models}) >= 45
    assert {model["source"] for model in models} == set(sources)
    for model in models:
        assert model["hq"] % model["hk"] == 0 and model["layers"] and model["kind"] in ("decoder", "encoder", "cross")
        assert ("between" in model) != ("lengths" in model) and ("keys" in model) == (model["kind"] == "cross")


@pytest.mark.parametrize("device, explained_as", [("cuda", "sm90"), ("cuda", "sm80"), ("cpu", "cpu")])
def test_every_shape_is_legal(device, explained_as):
    for seed in range(3):
        for shape in sweep.shapes(300, seed, device):
            assert tessera.explain(shape.case, device=explained_as).backend, shape.case


def test_every_model_is_legal_in_each_of_its_layers():
    for model in sweep.models():
        for layer in model["layers"]:
            for seed in range(6):
                case = sweep._case(sweep._Draw(f"{seed}"), dict(model, layers=[layer]), sweep.LIMITS["cuda"])
                assert layer in case and tessera.explain(case, device="sm90").backend, case


def test_the_draw_has_what_models_have():
    words = collections.Counter(word for line in lines("cuda") for word in line.split())
    starts = collections.Counter(word.split("=")[0] for word in words.elements())
    assert min(words["fwd"], words["bwd"]) > 90 and words["bf16"] == 300
    for word in ("causal", "alibi", "layout=thd", "align=bottom_right", "sink=learnable", "softcap=50", "dqk=192",
                 "grads=dbias", "grads=dsink", "bias=post/bhqk"):
        assert words[word], word
    assert starts["window"] > 10 and starts["segments"] > 5 and starts["sq"] > 20
    lengths = [int(word[2:]) for line in lines("cuda") for word in line.split() if word.startswith("s=")]
    powers = sum(math.log2(length).is_integer() for length in lengths)
    assert 50 < powers < len(lengths) - 100


@pytest.mark.parametrize("device", sweep.LIMITS)
def test_a_shape_keeps_to_the_limits(device):
    limits = sweep.LIMITS[device]
    for line in lines(device):
        given = dict(word.split("=", 1) for word in line.split() if "=" in word)
        b, sq = int(given["b"]), int(given.get("s") or given["sq"])
        sk, hq = int(given.get("s") or given["sk"]), int(given.get("h") or given["hq"])
        hk, dqk = int(given.get("h") or given["hk"]), int(given.get("d") or given["dqk"])
        elements = b * (sq * hq * dqk + sk * hk * (dqk + int(given.get("d") or given["dv"])))
        packed = given.get("layout") == "thd"  # half as many are expected, and two sequences at least
        assert elements <= limits.elements * (4 if packed else 1), line
        if "segments" in given:
            assert b * sq * sk <= sweep._LARGEST_DENSE, line


# ---- what is kept ----

def entry(case: str, times: float | None, **more) -> dict:
    peers_of = {"torch": {"ms": 1.0, "tflops": 1.0, "times": times} if times else {"refused": "no"},
                "numpy": {"ms": 9.0, "tflops": 1.0, "times": 9 * times} if times else {"refused": "no"}}
    return {"case": case, "pass": case[:3], "ms": 1.0, "tflops": 2.0, "flop": 2e9, "peers": peers_of, **more}


@pytest.fixture
def measured(monkeypatch):
    """The cases that bench measured, each in no time, and the function that did: at .fails_at cases it breaks off."""
    seen: list[str] = []

    def measure(case, opened, against, device, args):
        if measure.fails_at == len(seen):
            raise OSError("the machine went away")
        seen.append(case)
        time.sleep(measure.seconds)
        return entry(case, 1 + len(seen) / 10)

    measure.fails_at, measure.seconds = None, 0
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "_open", lambda line: None)
    return seen, measure


def swept(path, shapes: int, *more) -> int:
    return main(["bench", "--suite", "sweep", "--shapes", str(shapes), "--against", "torch,numpy", "--json", str(path),
                 *more])


def test_a_sweep_that_breaks_off_goes_on(tmp_path, measured):
    seen, measure = measured
    path = tmp_path / "sweep.json"
    measure.fails_at = 3
    with pytest.raises(OSError, match="went away"):
        swept(path, 6, "--resume")
    before = json.loads(path.read_text())
    assert [row["case"] for row in before] == seen == lines("cpu")[:3]
    measure.fails_at = None
    assert swept(path, 6, "--resume") == 0
    rows = json.loads(path.read_text())
    assert rows[:3] == before and seen == lines("cpu")[:6] == [row["case"] for row in rows]
    assert swept(path, 6, "--resume") == 0 and len(seen) == 6, "nothing was left"
    assert not list(tmp_path.glob("*.part"))
    assert swept(path, 6) == 0 and len(seen) == 12, "without --resume, all anew"


def test_resuming_measures_what_lacks_a_peer(tmp_path, measured):
    seen, _ = measured
    path = tmp_path / "sweep.json"
    rows = [entry(case, 2.0) for case in lines("cpu")[:3]]
    del rows[1]["peers"]["numpy"]
    rows[2] = {"case": rows[2]["case"], "pass": "fwd", "error": "too large"}
    path.write_text(json.dumps(rows + [entry("fwd fp32 b=1 s=8 h=1 d=8", 2.0)]))
    assert swept(path, 3, "--resume") == 0
    assert seen == [rows[1]["case"]]
    assert {row["case"] for row in json.loads(path.read_text())} == set(lines("cpu")[:3])


def test_resume_needs_a_file(capsys, tmp_path):
    assert main(["bench", "--suite", "sweep", "--resume"]) == 2
    assert "--resume" in capsys.readouterr().err
    (tmp_path / "no.json").write_text("{")
    assert swept(tmp_path / "no.json", 2, "--resume") == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["bench", "--suite", "sweep", "--shapes", "0"]) == 2


@pytest.mark.parametrize("ahead", [0, 2])
def test_as_many_shapes_as_fit(tmp_path, measured, capsys, monkeypatch, ahead):
    seen, measure = measured
    monkeypatch.setattr(bench.bench_devices.Cpu, "cases_ahead", ahead)
    measure.seconds = 0.05
    began = time.monotonic()
    assert swept(tmp_path / "sweep.json", 100, "--seconds", "0.5") == 0
    assert time.monotonic() - began < 4 and 1 <= len(seen) < 12
    said = capsys.readouterr()
    assert f"{len(seen)} of 100 shapes measured" in said.out
    assert f"--seconds 0.5: {len(seen)} of 100" in said.err


# ---- what is said ----

RESULTS = [entry(f"{('fwd', 'bwd')[i % 2]} bf16 b=1 s={64 + i} h=1 d=64", ratio, model=f"model {i}",
                 family=("even", "odd")[i % 2])
           for i, ratio in enumerate([1.5, 0.99, 2.0, 0.5, None, 1.0, 3, 4, 5, 6, 7, 8, 9, 0.97])]


def test_the_worst_come_first():
    worst = sweep.worst(RESULTS)
    assert [row["ratio"] for row in worst] == [0.5, 0.97, 0.99, 1.0, 1.5, 2.0, 3, 4, 5, 6]
    assert worst[0]["best_peer"] == "torch" and worst[0]["model"] == "model 3"


def test_the_best_peer_is_the_fastest():
    row = entry("fwd bf16 b=1 s=64 h=1 d=64", 2.0)
    row["peers"]["cudnn"] = {"ms": 0.8, "tflops": 1.0, "times": 0.8}
    assert sweep.best_peer(row) == ("cudnn", 0.8)
    assert sweep.best_peer(RESULTS[4]) is None and sweep.best_peer({"case": "fwd", "error": "no"}) is None


def test_the_summary_counts():
    rows = {row["of"]: row for row in sweep.summary(RESULTS)}
    assert list(rows)[:3] == ["all", "fwd", "bwd"] and rows["all"]["shapes"] == 13
    assert rows["all"]["below_1"] == 3 / 13 and rows["all"]["below_0.98"] == 2 / 13
    odd = [0.99, 0.5, 1.0, 4, 6, 8, 0.97]
    assert rows["odd"]["geomean"] == pytest.approx(math.prod(odd)**(1 / 7))
    assert list(rows)[3:] == ["odd", "even"], "the worst family first"
    assert sweep.summary([RESULTS[4]]) == []


def test_a_report_without_peers(capsys):
    sweep.report([RESULTS[4], dict(RESULTS[0], error="no", peers={})], 3)
    assert "2 of 3 shapes measured, 1 of them without a peer, 1 failed" in capsys.readouterr().out


def test_the_plot_has_the_worst(tmp_path):
    plt = pytest.importorskip("matplotlib.pyplot")
    figure = plot._sweep(plt, RESULTS, ["torch", "numpy"])
    axes, = figure.axes
    shown = [text.get_text() for text in axes.texts]
    assert shown[:10] == [str(rank) for rank in range(1, 11)]
    assert "0.500 torch" in shown[10] and RESULTS[3]["case"] in shown[10] and shown[10].count("\n") == 9
    points = sum(len(points.get_offsets()) for points in axes.collections)
    assert points == 13
    plt.close(figure)
    with pytest.raises(case_lines.UsageError, match="no peer"):
        plot.draw("sweep", RESULTS[4:5], [], str(tmp_path / "plot.png"))


def test_a_sweep_runs(tmp_path):
    """On a CPU, as its users run it, and what its file says again."""
    path, picture = tmp_path / "sweep.json", tmp_path / "sweep.png"
    command = [sys.executable, "-m", "tessera", "bench"]
    asked = ["--suite", "sweep", "--device", "cpu", "--shapes", "3", "--quick", "--against", "numpy"]
    done = subprocess.run([*command, *asked, "--json", str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())
    assert [row["case"] for row in rows] == lines("cpu")[:3]
    for row, shape in zip(rows, SHAPES["cpu"]):
        assert (row["model"], row["family"]) == (shape.model, shape.family) and row["ms"] > 0, row
        assert row["flop"] == pytest.approx(row["tflops"] * row["ms"] * 1e9)
    assert "3 of 3 shapes measured" in done.stdout and "summary" in done.stdout
    plots = ["--plot", str(picture)] if importlib.util.find_spec("matplotlib") else []
    again = subprocess.run([*command, "--from", str(path), *plots], capture_output=True, text=True, timeout=120)
    assert again.returncode == 0 and picture.exists() == bool(plots), again.stderr
    assert again.stdout == done.stdout
