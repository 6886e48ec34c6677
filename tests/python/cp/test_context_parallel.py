# SPDX-License-Identifier: Apache-2.0
"""Shards and schedules as data: every pair once, every row that travels is read, work is even."""

import itertools
import random

import numpy as np
import pytest

from tessera.context_parallel import Links, Shards, cost, plan, schedule
from tessera.context_parallel.schedule import Band

LENGTHS = [0, 1, 127, 128, 129, 300, 1000]


def every_kind(lengths, size):
    yield Shards.zigzag(lengths, size)
    yield Shards.zigzag(lengths, size, align=1)
    yield Shards.contiguous(lengths, size)
    yield Shards.balanced(lengths, size)
    yield Shards.balanced(lengths, size, window=(64, 0))
    yield Shards.striped(lengths, size, 3)
    padded = [-(-length // (2 * size)) * 2 * size for length in lengths]
    yield Shards.te(np.cumsum([0, *padded]), size, np.cumsum([0, *lengths]))
    yield Shards.cut(np.cumsum([0, *padded]), size, np.cumsum([0, *lengths]))


@pytest.mark.parametrize("size", range(1, 8))
def test_each_token_lies_in_one_row(size):
    for shards in every_kind(LENGTHS, size):
        index = np.concatenate([shards.index(rank) for rank in range(size)])
        assert sorted(index[index >= 0]) == list(range(sum(LENGTHS))), shards
        for rank in range(size):
            ids, positions = shards.sequence_ids(rank), shards.positions(rank)
            begins = np.cumsum([0, *LENGTHS])
            held = ids >= 0
            assert (begins[ids[held]] + positions[held] == shards.index(rank)[held]).all()
            assert held.sum() == shards.tokens(rank) and len(ids) == shards.extents[rank]
            if shards.in_order:
                own = shards.cu_seqlens(rank)
                assert own[0] == 0 and own[-1] == shards.extents[rank] and (np.diff(own) >= 0).all()
                for n in range(len(LENGTHS)):
                    assert set(ids[own[n]:own[n + 1]]) <= {n, -1}
        assert Shards.parse(shards.text) == shards and hash(Shards.parse(shards.text)) == hash(shards)


def test_our_cuts_lie_at_tiles():
    for shards in (Shards.zigzag(LENGTHS, 3), Shards.contiguous(LENGTHS, 3)):
        for run in itertools.chain(*shards.runs):
            assert run.start % 128 == 0 or run.length == 0
            assert run.stop % 128 == 0 or run.stop == LENGTHS[run.sequence]


def test_te_layout_keeps_padding_where_it_is():
    shards = Shards.te([0, 16, 32], 2, [0, 11, 27])
    assert shards.positions(0).tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 0, 1, 2, 3, 12, 13, 14, 15]
    assert shards.sequence_ids(0).tolist() == [0] * 4 + [-1] * 4 + [1] * 8
    assert shards.cu_seqlens(0).tolist() == [0, 8, 16] and shards.tokens(0) == 12


def test_a_buffer_is_cut_where_it_is():
    shards = Shards.cut([0, 5, 5, 12, 16], 2, [0, 4, 4, 11, 11])
    assert [shards.positions(rank).tolist() for rank in (0, 1)] == [[0, 1, 2, 3, 0, 0, 1, 2], [3, 4, 5, 6, 0, 0, 0, 0]]
    assert shards.sequence_ids(0).tolist() == [0] * 4 + [-1] + [2] * 3
    assert shards.sequence_ids(1).tolist() == [2] * 4 + [-1] * 4
    assert shards.cu_seqlens(1).tolist() == [0, 0, 0, 4, 8]
    assert Shards.cut([0, 0], 3).extents == (0, 0, 0)


def pairs(shards, band):
    return {(n, i, j) for n, length in enumerate(shards.lengths)
            for i in range(length) for j in range(length)
            if (band.left < 0 or j >= i + band.shifts[n] - band.left) and
            (band.right < 0 or j <= i + band.shifts[n] + band.right)}


def arrived(shards, inner, hops_of, rank, last=-1):
    """Tokens in the rows of a rank's buffer after its hops up to `last`; hops_of(rank) are a rank's."""
    hops = hops_of(rank)
    number = last % len(hops)
    members = {"all": range(shards.size), "outer": range(rank % inner, shards.size, inner),
               "inner": range(rank // inner * inner, (rank // inner + 1) * inner)}[hops[number].group]
    own = members.index(rank)
    rows = [None] * sum(run.length for run in hops[number].wants[own])
    for i, (peer, target) in enumerate(zip(members, hops[number].route(own).receive)):
        source = arrived(shards, inner, hops_of, peer, number - 1) if number else \
            list(zip(shards.sequence_ids(peer), shards.positions(peer)))
        sent = hops_of(peer)[number].route(i).send[own]
        assert len(sent) == len(target)
        for a, b in zip(sent, target):
            assert rows[b] is None, "a row must come once"
            rows[b] = source[a]
    return rows


@pytest.mark.parametrize("exchange, size, inner", [
    ("keys", 1, 1), ("keys", 3, 1), ("keys", 5, 1), ("ring", 2, 1), ("ring", 4, 1),
    ("keys+keys", 4, 2), ("keys+keys", 6, 3)])
@pytest.mark.parametrize("left, right", [(-1, 0), (20, 5), (-1, -1), (0, 0)])
def test_every_visible_pair_is_computed_once_of_rows_that_came(exchange, size, inner, left, right):
    rng = random.Random(size * 100 + left)
    lengths = [0, 1, 40, 129]
    band = Band(left, right, tuple(rng.randint(-30, 30) for _ in lengths))
    for shards in (Shards.zigzag(lengths, size), Shards.zigzag(lengths, size, align=16),
                   Shards.striped(lengths, size, 10)):
        visible, seen = pairs(shards, band), []
        stages = [schedule.stages(exchange, shards, shards, band, rank, inner)
                  for rank in range(size)]
        for rank, own in enumerate(stages):
            for step, stage in enumerate(own):
                rows = arrived(shards, inner, lambda r: stages[r][step].hops, rank)
                assert None not in rows, "every row of a buffer must come"
                used = set()
                for call in stage.calls:
                    for n, (q, k) in enumerate(zip(call.q, call.k)):
                        used.update(range(k.at, k.at + k.length))
                        assert rows[k.at:k.at + k.length] == [(n, j) for j in range(k.start, k.stop)]
                        seen += [(n, i, j) for i in range(q.start, q.stop)
                                 for j in range(k.start, k.stop) if (n, i, j) in visible]
                assert used == set(range(len(rows))), "every row that travels must be read"
        assert len(seen) == len(set(seen)) and set(seen) == visible


@pytest.mark.parametrize("hq, hk", [(6, 2), (6, 3), (7, 7), (12, 1), (3, 1)])
def test_heads_are_dealt_once_in_at_most_three_calls(hq, hk):
    for size in range(1, 9):
        dealt = []
        for rank in range(size):
            pieces = schedule.head_pieces(hq, hk, *schedule.head_range(hq, rank, size))
            assert len(pieces) <= 3
            for q0, q1, k0, k1 in pieces:
                assert (q1 - q0) % (k1 - k0) == 0
                per = (q1 - q0) // (k1 - k0)
                dealt += [(h, k0 + (h - q0) // per) for h in range(q0, q1)]
        assert dealt == [(h, h // (hq // hk)) for h in range(hq)]


def documents(mean, total, seed):
    rng, lengths = np.random.default_rng(seed), []
    while sum(lengths) < total:
        lengths.append(min(int(rng.lognormal(np.log(mean) - 0.5, 1.0)) + 1, total - sum(lengths)))
    return lengths


def test_balance():
    model = dict(hq=8, hk=8, dqk=128, dv=128, causal=True)
    assert plan(Shards.zigzag([131072], 8), **model).balance < 1.01
    assert plan(Shards.contiguous([131072], 8), **model).balance > 1.5
    window = dict(model, causal=True, window=(4096, 0))
    assert plan(Shards.contiguous([131072], 8), **window).balance < 1.05
    for seed in range(3):
        lengths = documents(2048, 131072, seed)
        shards = Shards.balanced(lengths, 8)
        assert plan(shards, **model).balance < 1.1
        assert max(map(shards.tokens, range(8))) < 1.03 * 131072 / 8
        spread = Shards.zigzag(lengths, 8)
        received = [plan(s, **model, exchange="keys", groups=1).chosen.bytes[0]
                    for s in (shards, spread)]
        assert received[0] < received[1] / 2, "documents that stay whole need not travel"


def test_choice():
    model = dict(dqk=128, dv=128, causal=True)
    shards = Shards.zigzag([32768], 8)
    assert plan(shards, hq=16, hk=16, **model).exchange == "heads"
    assert plan(shards, hq=64, hk=8, **model).exchange == "keys"
    assert plan(shards, hq=16, hk=16, has_rows=True, **model).exchange == "keys"
    two = plan(Shards.zigzag([32768], 16), hq=16, hk=16, inner=8, **model)
    assert two.exchange == "heads+keys"
    assert plan(Shards.contiguous([131072], 16), hq=32, hk=8, inner=8, window=(4096, 0),
                **model).exchange == "keys+keys"
    assert plan(Shards.striped([32768], 8), hq=64, hk=8, **model).exchange == "heads"
    tight = plan(shards, hq=64, hk=8, max_bytes=1 << 10, **model)
    assert tight.exchange == "ring", "the smallest buffers, where nothing fits"
    assert "ring" in str(tight) and "a model" in str(tight)
    # Bytes of the table in docs/context_parallel.md: heads/keys = (hq/hk + 1)/size, hk >= size.
    for hq, hk in ((16, 16), (32, 8)):
        by_name = {o.exchange: o for o in plan(shards, hq=hq, hk=hk, **model).options}
        ratio = by_name["heads"].bytes[0] / by_name["keys"].bytes[0]
        assert ratio == pytest.approx((hq / hk + 1) / 8, rel=0.01)


@pytest.mark.parametrize("call, words", [
    (lambda: Shards.zigzag([5, -1], 2), "lengths=-1: must not be negative"),
    (lambda: Shards.zigzag([5], 0), "size=0: must be at least 1"),
    (lambda: Shards.zigzag([5.0], 2), "lengths=float: must be a host integer"),
    (lambda: Shards.zigzag(5, 2), "lengths=5: must be a list"),
    (lambda: Shards.of([[(0, 0, 5)], [(0, 4, 5)]]), "position 4 of sequence 0: lies on two ranks"),
    (lambda: Shards.of([[(0, 0, 5)], [(0, 6, 5)]]), "position 5 of sequence 0: is missing"),
    (lambda: Shards.of([[(0, 5, 5), (0, 0, 5)]]), "must ascend"),
    (lambda: Shards.of([[(0, 5)]]), r"must be \(sequence, start, length\)"),
    (lambda: Shards.te([0, 6], 2), "multiple of 2 \\* size = 4; pad to it, or use Shards.zigzag"),
    (lambda: Shards.cut([0, 7], 2), "cu_seqlens_padded=7: the last must be a multiple of size = 2"),
    (lambda: Shards.cut([0, 8], 2, [0, 9]), "must not exceed its extent, 8"),
    (lambda: Shards.te([0, 8], 2, [0, 4, 8]), "cu_seqlens=3: must have as many entries"),
    (lambda: Shards.te([0, 8], 2, [0, 9]), "must not exceed its extent, 8"),
    (lambda: plan(Shards.zigzag([128], 2), hq=2, hk=2, dqk=8, dv=8, exchange="all"), "exchange='all'"),
    (lambda: plan(Shards.zigzag([128], 2), hq=2, hk=2, dqk=8, dv=8, exchange="keys", groups=3),
     "there are 2 kv heads"),
    (lambda: plan(Shards.zigzag([128], 2), hq=2, hk=2, dqk=8, dv=8, exchange="heads", has_rows=True),
     "use keys"),
])
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_machine_of_slow_links_prefers_fewer_bytes():
    slow = Links(inside=1e9)
    shards = Shards.zigzag([32768], 8)
    kw = dict(hq=16, hk=16, dqk=128, dv=128, causal=True)
    assert sum(plan(shards, links=slow, **kw).chosen.exposed) > \
        sum(plan(shards, **kw).chosen.exposed)
    assert cost.band_of(True, (5, -1), 3, 2) == Band(5, 0, (3, 3))
