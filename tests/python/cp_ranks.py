# SPDX-License-Identifier: Apache-2.0
"""Cases of the conformance suite on several ranks: shards of their tensors, and the verdict on what
came back. Ranks are threads that share a mailbox, or processes (test_cp_processes)."""

from __future__ import annotations

import os
import random
import threading

import numpy as np
import torch

from tessera.cli import conformance
from tessera.context_parallel import Shards
from tessera.torch import comm
from tessera.cli.through.torch import to_numpy, to_torch
from tessera.torch import context_parallel as cp

WHOLE = ("dsink", "dalibi_slopes")
# cpu or cuda: where ranks compute. Threads share a GPU, processes have one each.
DEVICE = os.environ.get("TESSERA_TEST_DEVICE", "cpu")


# ---- ranks in one process ----

class Mailbox:
    """What threads of one process leave for each other."""

    def __init__(self, size: int, name: str):
        self.size, self.name, self.barrier = size, name, threading.Barrier(size)
        self.sent = [None] * size
        self.bytes = [0] * size  # received from others

    def member(self, rank: int):
        return comm.register(_Member(self, rank))


class _Member:
    def __init__(self, box: Mailbox, rank: int):
        self.box, self.rank, self.size = box, rank, box.size
        self.name = f"{box.name}.{rank}"

    def all_to_all(self, sent, sizes, received_sizes):
        self.box.sent[self.rank] = sent.split(sizes)
        _finish()
        self.box.barrier.wait(60)
        parts = [self.box.sent[peer][self.rank] for peer in range(self.size)]
        assert [len(part) for part in parts] == received_sizes, "both ends must agree on sizes"
        self.box.bytes[self.rank] += sum(received_sizes)
        received = torch.cat(parts)
        _finish()
        self.box.barrier.wait(60)
        return received, None


def _finish():
    """Waits for what this rank has launched: another is about to read it, or to write over it."""
    if DEVICE == "cuda":
        torch.cuda.current_stream().synchronize()


class Ranks:
    """Threads that are ranks of a group, or of (inner, outer) groups where inner > 1."""
    count = 0

    def __init__(self, size: int, inner: int = 1):
        Ranks.count += 1
        self.size, self.inner = size, inner
        self.boxes = [Mailbox(inner if inner > 1 else size, f"test{Ranks.count}.{i}")
                      for i in range(size // inner if inner > 1 else 1)]
        self.across = [Mailbox(size // inner, f"test{Ranks.count}.across{i}")
                       for i in range(inner if inner > 1 else 0)]

    def group(self, rank: int):
        if self.inner == 1:
            return self.boxes[0].member(rank)
        outer, inner = divmod(rank, self.inner)
        return self.boxes[outer].member(inner), self.across[inner].member(outer)

    def run(self, function):
        """function(rank, group) on every rank; their results, or the first exception."""
        results, errors = [None] * self.size, {}

        def one(rank):
            try:
                results[rank] = function(rank, self.group(rank))
            except BaseException as error:
                errors[rank] = error
                for box in (*self.boxes, *self.across):
                    box.barrier.abort()
        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        real = [e for _, e in sorted(errors.items())
                if not isinstance(e, threading.BrokenBarrierError)]
        if errors:
            raise (real or list(errors.values()))[0]
        return results


class Echo:
    """A group whose other rank sends back what it was sent."""
    rank, size, name = 0, 2, "echo"

    def all_to_all(self, sent, sizes, received_sizes):
        return sent.clone(), None


# ---- a case on ranks ----

class Whole:
    """A case's tensors as rows: `rows[side]` of packed position -> row of the flattened tensor."""

    def __init__(self, case: conformance.Case):
        self.case, given = case, case.arguments()
        self.given = given
        layout = given.get("layout", "bshd")
        self.layouts = layout if isinstance(layout, tuple) else (layout, layout)
        self.lengths, self.rows = [], []
        for side, name, one in (("q", "q", self.layouts[0]), ("k", "k", self.layouts[1])):
            x = given[name]
            if one == "thd":
                cu = given[f"cu_seqlens_{side}"].tolist()
                starts = given.get(f"cu_seqlens_{side}_padded")
                starts = cu if starts is None else starts.tolist()
                lengths = [b - a for a, b in zip(cu, cu[1:])]
            else:
                b, s = x.shape[one.index("b")], x.shape[one.index("s")]
                given_lengths = given.get(f"seqlens_{side}")
                lengths = [s] * b if given_lengths is None else given_lengths.tolist()
                starts = [n * s for n in range(b)]
            self.lengths.append(lengths)
            self.rows.append(np.concatenate([np.arange(at, at + n) for at, n in
                                             zip(starts, lengths)] + [np.zeros(0, int)]).astype(int))

    @property
    def is_self(self) -> bool:
        return self.lengths[0] == self.lengths[1]

    def flat(self, x, side: int):
        """[rows, h, d] of a tensor in the case's layout, a view or a copy."""
        layout = self.layouts[side]
        if layout != "thd":
            order = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}[layout]
            x = np.transpose(x, order)
            x = x.reshape(-1, *x.shape[2:])
        return x

    def of_rows(self, x, side: int):
        """lse or ids of the case -> [.., rows]."""
        if self.layouts[side] == "thd":
            return x
        return x.reshape(-1) if x.ndim == 2 else np.moveaxis(x, 1, 0).reshape(x.shape[1], -1)


def arguments_of(whole: Whole, shards: tuple, rank: int) -> dict:
    """What a rank passes to context_parallel.attention, packed."""
    given = dict(whole.given)
    index = [whole.rows[side][shards[side].index(rank)] for side in (0, 1)]
    local = {"layout": "thd"}
    for name, side in (("q", 0), ("k", 1), ("v", 1)):
        local[name] = tensor(whole.flat(given[name], side)[index[side]])
    for name in ("causal", "window", "align", "softmax_scale", "softcap", "bias_at", "dropout_p",
                 "deterministic"):
        if given.get(name) is not None:
            local[name] = given[name]
    for name in ("sink", "alibi_slopes", "k_scale", "v_scale", "rng_state"):
        if given.get(name) is not None:
            x = given[name]
            local[name] = x if isinstance(x, str) else tensor(np.ascontiguousarray(x))
    if "align" not in local and not whole.is_self:
        local["align"] = "top_left"
    if "segment_ids" in given:
        ids = given["segment_ids"]
        ids = ids if isinstance(ids, tuple) else (ids, ids)
        local["segment_ids"] = tuple(tensor(whole.of_rows(x, side)[index[side]])
                                     for side, x in enumerate(ids))
    if "key_ranges" in given:
        local["key_ranges"] = tensor(_ranges(whole, given["key_ranges"], index[0]))
    for name in ("keep", "drop", "bias"):
        if given.get(name) is not None:
            local[name] = tensor(_dense(given[name], shards[0], rank))
    return local


def _ranges(whole: Whole, ranges, rows):
    if whole.layouts[0] == "thd":
        return ranges if ranges.shape[1] == 1 else ranges[:, rows]
    b, h, s, n = ranges.shape
    if b == s == 1:
        return ranges[0]
    q = whole.given["q"]
    extents = [q.shape[whole.layouts[0].index(axis)] for axis in "bs"]
    return np.moveaxis(np.broadcast_to(ranges, (extents[0], h, extents[1], n)), 1, 0).reshape(
        h, -1, n)[:, rows]


def _dense(x, shards: Shards, rank: int):
    """Rows by q's shard: [b, h, most rows of a sequence, keys]."""
    x = x[(None,) * (4 - x.ndim)]
    if x.shape[2] == 1:
        return np.ascontiguousarray(x)
    places = _local_rows(shards, rank)
    most = max([len(own) for own in places] + [1])
    local = np.zeros((len(places), x.shape[1], max(most, 2), x.shape[3]), x.dtype)
    for n, own in enumerate(places):
        local[n, :, :len(own)] = x[n if x.shape[0] > 1 else 0][:, own]
    return local


def _local_rows(shards: Shards, rank: int):
    ids, positions = shards.sequence_ids(rank), shards.positions(rank)
    return [positions[ids == n] for n in range(len(shards.lengths))]


def part_of(whole: Whole, shards: tuple, rank: int, group, exchange: str, **more) -> dict:
    """A rank's results: rows by name, and its share of gradients of whole arguments."""
    case, local = whole.case, arguments_of(whole, shards, rank)
    q, k, v = (local.pop(name) for name in "qkv")
    spread = dict(shards=shards[0], shards_k=None if shards[0] == shards[1] else shards[1],
                  group=group, exchange=exchange, **more)
    outputs = case.group("outputs")
    if not case.is_backward:
        found = cp.attention(q, k, v, **spread, **local, return_lse=True,
                             return_max_logit="max_logit" in outputs)
        return dict(zip(("o", "lse", "max_logit"), found))
    leaves = {"dq": q, "dk": k, "dv": v} | {name: local[name[1:]] for name in outputs
                                            if name not in ("dq", "dk", "dv")}
    for x in leaves.values():
        x.requires_grad_()
    o, lse = cp.attention(q, k, v, **spread, **local, return_lse=True)
    backward = case.group("backward")
    rows = whole.rows[0][shards[0].index(rank)]
    # The error rule is about a backward pass that is given the reference's o and lse.
    o.data.copy_(tensor(whole.flat(backward["o"], 0)[rows]))
    lse.data.copy_(tensor(whole.of_rows(backward["lse"], 0)[:, rows]))
    do = tensor(whole.flat(backward["do"], 0)[rows])
    dlse = backward.get("dlse")
    roots, into = [o], [do]
    if dlse is not None:
        roots, into = [o, lse], [do, tensor(whole.of_rows(dlse, 0)[:, rows])]
    names = [name for name in outputs]
    return dict(zip(names, torch.autograd.grad(roots, [leaves[name] for name in names], into)))


def verdict(whole: Whole, shards: tuple, parts: list[dict]) -> dict:
    """The case's own judgement of what the ranks have together."""
    outputs = whole.case.group("outputs")
    for name, out in outputs.items():
        out[...] = -np.inf if name in ("lse", "max_logit") else 0
        found = [to_array(part[name], out.dtype) for part in parts]
        if name in ("o", "dq", "dk", "dv"):
            side = 0 if name in ("o", "dq") else 1
            flat = whole.flat(out, side)
            for rank, x in enumerate(found):
                flat[whole.rows[side][shards[side].index(rank)]] = x
            _write_back(whole, out, flat, side)
        elif name == "lse":
            flat = np.array(whole.of_rows(out, 0))
            for rank, x in enumerate(found):
                flat[:, whole.rows[0][shards[0].index(rank)]] = x
            out[...] = flat if out.ndim == 2 else np.moveaxis(
                flat.reshape(out.shape[1], out.shape[0], -1), 0, 1)
        elif name == "max_logit":
            for x in found:
                assert np.array_equal(x, found[0]), "max_logit must be the group's"
            out[...] = found[0]
        elif name == "dbias":
            _sum_bias(out, found, shards[0])
        else:
            out[...] = sum(x.astype(np.float64) for x in found).astype(out.dtype)
    return whole.case.compare()


def _sum_bias(out, found, shards):
    total = np.zeros(out.shape, np.float64)
    view = total[(None,) * (4 - out.ndim)]
    for rank, x in enumerate(found):
        x = x.astype(np.float64)
        if view.shape[2] == 1:
            view += x
            continue
        for n, own in enumerate(_local_rows(shards, rank)):
            view[n if view.shape[0] > 1 else 0][:, own] += x[n][:, :len(own)]
    out[...] = total.astype(out.dtype)


def _write_back(whole, out, flat, side):
    layout = whole.layouts[side]
    if layout == "thd":
        out[...] = flat
        return
    b, s = out.shape[layout.index("b")], out.shape[layout.index("s")]
    x = flat.reshape(b, s, *flat.shape[1:])
    out[...] = {"bshd": x, "sbhd": np.moveaxis(x, 0, 1), "bhsd": np.moveaxis(x, 1, 2)}[layout]


def tensor(x: np.ndarray) -> torch.Tensor:
    return to_torch(np.ascontiguousarray(x)).clone().to(DEVICE)


def to_array(x: torch.Tensor, dtype) -> np.ndarray:
    return np.array(to_numpy(x.detach().cpu().contiguous(), x_dtype(x, dtype)))


def x_dtype(x, dtype):
    return dtype if str(x.dtype) == f"torch.{dtype.name}" else np.dtype(str(x.dtype)[6:])


# ---- random problems ----

def random_shards(rng: random.Random, lengths, size: int, in_order: bool) -> Shards:
    kind = rng.choice(["zigzag", "contiguous", "balanced", "striped", "uneven", "zigzag"])
    if kind == "striped":
        return Shards.striped(lengths, size, rng.choice([16, 64, 7]))
    if kind == "uneven":
        ranks = [[] for _ in range(size)]
        for n, length in enumerate(lengths):
            cuts = sorted(rng.randint(0, length) for _ in range(rng.randint(0, 4)))
            for a, b in zip([0, *cuts], [*cuts, length]):
                ranks[rng.randrange(size)].append((n, a, b - a))
        if not in_order:
            for rank in ranks:
                sequences = list({n for n, _, _ in rank})
                rng.shuffle(sequences)
                rank.sort(key=lambda run: (sequences.index(run[0]), run[1]))
        return Shards.of(ranks)
    align = {"align": rng.choice([128, 16, 1])} if kind == "zigzag" else {}
    return getattr(Shards, kind)(lengths, size, **align)


FEATURES = (("", "alibi", "alibi=bh"), ("", "dropout=0.2"))


def random_case(rng: random.Random, backward: bool, features=FEATURES) -> str:
    """A line of the case language, of self or cross attention; of each of `features` one word."""
    pick = rng.choice
    hk = pick([1, 2, 3, 4])
    words = ["bwd" if backward else "fwd", pick(["fp32", "fp32", "bf16", "fp16"])]
    same = pick([True, True, False])
    sq = pick([1, 40, 127, 128, 129, 200, 300])
    sk = sq if same else pick([1, 60, 129, 256, 310])
    words += [f"b={pick([1, 2, 3])}", f"sq={sq} sk={sk}", f"hq={hk * pick([1, 2, 3])} hk={hk}",
              pick(["d=16", "d=32", "dqk=24 dv=40", "d=64"])]
    layout = pick(["thd", "bshd", "sbhd", "bhsd", "thd"])
    words.append(f"layout={layout}")
    lens = pick(["full", f"random:{rng.randint(0, 999)}"])
    words.append(f"lens={lens}" if same else f"lens_q={lens} lens_k=random:{rng.randint(0, 999)}")
    band = pick(["", "causal", "causal", f"window={pick([0, 5, 100])},{pick([0, 7, -1])}",
                 f"causal window={pick([16, 90])},0"])
    words += [band, f"align={pick(['top_left', 'bottom_right'])}"]
    words.append(pick(["", "", "softcap=20"]))
    words.append(pick(["", "", "sink=off_by_one", "sink=learnable"]))
    words.append(pick(["", "", "segments=3"]))
    dense = pick(["", "", "ranges=random:5", "ranges=two:6", "keep=random:0.7", "keep=keys:0.6/bk",
                  "bias=post", "bias=pre/bhqk", "keep=random:0.6/hqk", "bias=post/k"])
    words.append(dense)
    words += [pick(["", *options]) for options in features]
    grads = [name for name, word in (("dbias", "bias="), ("dsink", "sink=learnable"),
                                     ("dalibi_slopes", "alibi"))
             if any(word in x for x in words)]
    if backward:
        words += [f"grads={','.join(grads)}"] if grads and pick([True, False]) else []
        words.append(pick(["", "dlse"]))
    else:
        words.append(pick(["", "max_logit"]))
    return " ".join(word for word in words if word) + f" seed={rng.randint(0, 99)}"
