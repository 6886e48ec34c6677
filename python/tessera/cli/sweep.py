# SPDX-License-Identifier: Apache-2.0
"""bench --suite sweep: random shapes of real models, and what their results say: the worst ten, and a summary.

It finds slow cases that no hand-written suite has; another seed is another sample."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path

import numpy as np

from . import terminal, work

_MODELS = Path(__file__).resolve().parents[1] / "bench_suites" / "models.json"
_SPLITS = (1, 2, 4, 8)  # of the heads, over as many devices
_LARGEST_DENSE = 1 << 27  # elements of a mask [b, sq, sk] that the host makes for peers, and counts
_CLOSE = 0.98  # below, a peer is faster by more than the noise
_WORST = 10


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a shape may ask for: operations of the matrix products, and elements of q, k, v and the bias, which the
    host draws."""
    least_flops: float
    most_flops: float
    elements: int


LIMITS = {"cuda": Limits(3e10, 1e13, 64 << 20),  # 0.05 … 20 ms at 500 … 600 TFLOP/s
          "cpu": Limits(1e7, 2e9, 2 << 20)}


@dataclasses.dataclass(frozen=True)
class Shape:
    case: str
    model: str
    family: str


def models() -> list[dict]:
    """What bench_suites/models.json has of each model; "sources" there says where the figures are from."""
    return json.loads(_MODELS.read_text())["models"]


def shapes(count: int, seed: int, device: str) -> list[Shape]:
    """Distinct shapes for a device of LIMITS. The same seed gives the same ones; fewer are the first of more."""
    families: dict[str, list[dict]] = {}
    for model in models():
        families.setdefault(model["family"], []).append(model)
    found: dict[str, Shape] = {}
    attempt = 0
    while len(found) < count:
        draw = _Draw(f"{seed}/{attempt}")
        attempt += 1
        model = draw.one_of(draw.one_of(list(families.values())))  # a family of many models is no likelier
        shape = Shape(_case(draw, model, LIMITS[device]), model["model"], model["family"])
        found.setdefault(shape.case, shape)
    return list(found.values())


class _Draw:
    """Random.random() alone, whose numbers are the same in every version of Python."""

    def __init__(self, seed: str):
        self._random = random.Random(seed)

    def chance(self, p: float) -> bool:
        return self._random.random() < p

    def below(self, n: int) -> int:
        return int(self._random.random() * n)

    def one_of(self, choices):
        return choices[self.below(len(choices))]

    def log_uniform(self, low: float, high: float) -> float:
        return low * (high / low)**self._random.random()

    def length(self, low: int, high: int) -> int:
        """Log-uniform; training likes powers of 2, batches are padded to a multiple of 64, and users to neither."""
        exact = self.log_uniform(low, high)
        kind = self._random.random()
        if kind < 0.35:
            return min(max(2**round(math.log2(exact)), low), high)
        return min(max(64 * round(exact / 64), low), high) if kind < 0.6 else round(exact)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The sizes of one sequence, on one of the devices that share the heads."""
    sq: int
    sk: int
    hq: int
    hk: int
    dqk: int
    dv: int

    def halved(self) -> _Sizes:
        return dataclasses.replace(self, sq=-(-self.sq // 2), sk=-(-self.sk // 2))

    def words(self) -> str:
        lengths = f"s={self.sq}" if self.sq == self.sk else f"sq={self.sq} sk={self.sk}"
        heads = f"h={self.hq}" if self.hq == self.hk else f"hq={self.hq} hk={self.hk}"
        return f"{lengths} {heads} " + (f"d={self.dqk}" if self.dqk == self.dv else f"dqk={self.dqk} dv={self.dv}")


def _case(draw: _Draw, model: dict, limits: Limits) -> str:
    layer = draw.one_of(model["layers"])
    use = _use(draw, model, layer)
    backward = use != "chunk" and draw.chance(0.5)
    documents = 2 + draw.below(15)
    wanted = draw.log_uniform(limits.least_flops, limits.most_flops)
    sk = draw.length(*model["between"]) if "between" in model else draw.one_of(model["lengths"])
    sq = draw.length(min(256, sk // 2), min(8192, sk // 2)) if use == "chunk" else sk
    sk = draw.one_of(model["keys"]) if model["kind"] == "cross" else sk
    share, tokens = {"packed": (1 / 3, 1 / 2), "documents": (2 / (documents + 1), 1)}.get(use, (1, 1))

    def cost(sizes) -> tuple[float, float, int]:
        """Operations and elements of each sequence, and elements that all of them share."""
        bias = sizes.hq * sizes.sq * sizes.sk if "bias" in layer else 0
        own = tokens * (sizes.sq * sizes.hq * sizes.dqk + sizes.sk * sizes.hk * (sizes.dqk + sizes.dv))
        own, shared = (own + bias, 0) if "bhqk" in layer else (own, bias)
        return share * _flops(sizes, layer, backward), own, shared

    def fits(sizes) -> bool:
        flops, own, shared = cost(sizes)
        dense = sizes.sq * sizes.sk if use == "documents" or "segments" in layer else 0
        return flops <= limits.most_flops and own + shared <= limits.elements and dense <= _LARGEST_DENSE

    choices = [_Sizes(sq, sk, model["hq"] // split, max(model["hk"] // split, 1), model["dqk"], model["dv"])
               for split in _SPLITS
               if model["hq"] % split == 0 and (model["hk"] % split == 0 or split % model["hk"] == 0)]
    while not any(map(fits, choices)):
        choices = [sizes.halved() for sizes in choices]
    sizes = draw.one_of([sizes for sizes in choices if fits(sizes)])
    flops, own, shared = cost(sizes)
    batch = max(min(round(wanted / flops), int((limits.elements - shared) / own)), 2 if use == "packed" else 1)
    if use == "documents" or "segments" in layer:
        batch = min(batch, _LARGEST_DENSE // (sizes.sq * sizes.sk))
    mask = {"packed": f"layout=thd lens=random:{draw.below(1000)} longest", "documents": f"segments={documents}",
            "chunk": "align=bottom_right"}.get(use, "")
    learned = [f"d{name}" for name in ("bias", "sink") if backward and name in layer]
    words = ["bwd" if backward else "fwd", "bf16", f"b={batch}", sizes.words(), layer, mask,
             f"grads={','.join(learned)}" if learned else ""]
    return " ".join(filter(None, words))


def _use(draw: _Draw, model: dict, layer: str) -> str:
    """plain; packed: sequences of many lengths in one row; documents: several in each sequence, a mask between them;
    chunk: the last queries of a prompt whose other keys are cached."""
    if model["kind"] == "cross" or "bias" in layer or "segments" in layer or "between" not in model:
        return "plain"
    uses = {"decoder": ("packed", "packed", "documents", "chunk"), "encoder": ("packed", "packed")}[model["kind"]]
    return draw.one_of((*uses, *("plain",) * 5))


def _flops(sizes: _Sizes, layer: str, backward: bool) -> int:
    words = dict(word.partition("=")[::2] for word in layer.split())
    band = {"causal": "causal" in words, "align": "bottom_right"}
    if "window" in words:
        band["window"] = tuple(map(int, words["window"].split(",")))
    q, k, v = (np.broadcast_to(np.zeros((), np.uint16), (1, s, h, d))  # for their shapes alone
               for s, h, d in ((sizes.sq, sizes.hq, sizes.dqk), (sizes.sk, sizes.hk, sizes.dqk),
                               (sizes.sk, sizes.hk, sizes.dv)))
    return work.flops(work.visible_scores(q, k, v, band), sizes.dqk, sizes.dv, backward)


# ---- what the results say ----

def best_peer(result) -> tuple[str, float] | None:
    """The fastest peer of a result, and its time over tessera's; None if none ran."""
    times = [(peer["times"], name) for name, peer in result.get("peers", {}).items() if "times" in peer]
    return (min(times)[1], min(times)[0]) if times else None


def compared(result: dict) -> dict:
    """The result with its best peer."""
    best = best_peer(result)
    return {**result, "best_peer": best[0], "ratio": best[1]} if best else result


def is_sweep(results) -> bool:
    return bool(results) and all("model" in result for result in results)


def worst(results, count: int = _WORST) -> list[dict]:
    """Those where the best peer is fastest beside tessera, the worst first."""
    return sorted((compared(result) for result in results if best_peer(result)),
                  key=lambda result: result["ratio"])[:count]


def summary(results) -> list[dict]:
    """How many results have a peer, the geometric mean of their ratios, and the share of them below 1 and below 0.98:
    a row for all, for each pass, and for each family from the worst on."""
    rows = [compared(result) for result in results if best_peer(result)]
    groups = {"all": rows} if rows else {}
    for result in rows:
        groups.setdefault(result["pass"], []).append(result)
    families: dict[str, list[dict]] = {}
    for result in rows:
        families.setdefault(result["family"], []).append(result)
    found = [_group(name, group) for name, group in groups.items()]
    return found + sorted((_group(name, group) for name, group in families.items()), key=lambda row: row["geomean"])


def _group(name: str, results) -> dict:
    ratios = [result["ratio"] for result in results]
    return {"of": name, "shapes": len(ratios), "geomean": math.exp(sum(map(math.log, ratios)) / len(ratios)),
            "below_1": sum(ratio < 1 for ratio in ratios) / len(ratios),
            "below_0.98": sum(ratio < _CLOSE for ratio in ratios) / len(ratios)}


def report(results, drawn: int):
    """Prints the worst ten and the summary; drawn: how many shapes there were to measure."""
    alone = sum("error" not in result and not best_peer(result) for result in results)
    failed = sum("error" in result for result in results)
    print(f"\n{len(results)} of {drawn} shapes measured, {alone} of them without a peer, {failed} failed")
    slowest = worst(results)
    if not slowest:
        return
    terminal.print_table(
        ["<", ">ratio", ">ms", "<best peer", "<model", "<case"],
        [[str(i), f"{result['ratio']:.3f}", f"{result['ms']:.3f}", result["best_peer"], result["model"], result["case"]]
         for i, result in enumerate(slowest, 1)],
        title="\nthe worst: time of the best peer / time of tessera")
    terminal.print_table(
        ["<of", ">shapes", ">geomean", ">below 1", f">below {_CLOSE}"],
        [[row["of"], str(row["shapes"]), f"{row['geomean']:.3f}", f"{row['below_1']:.0%}", f"{row['below_0.98']:.0%}"]
         for row in summary(results)], title="\nsummary")
