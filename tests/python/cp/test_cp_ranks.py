# SPDX-License-Identifier: Apache-2.0
"""Attention on several ranks, which are threads here, judged as one device's is: random problems,
every feature, exchange and kind of shards, forward and backward."""

import contextlib
import random
import types
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import cp_ranks  # noqa: E402
import tessera.torch as tt  # noqa: E402
from tessera.cli import conformance  # noqa: E402
from tessera.context_parallel import Shards  # noqa: E402
from tessera.torch import comm  # noqa: E402
from tessera.torch.context_parallel import _messages  # noqa: E402
from tessera.torch.context_parallel._row_sums import Kind  # noqa: E402
from tessera.torch.context_parallel._rows import Rows  # noqa: E402
from tessera.torch import context_parallel as cp  # noqa: E402
from tessera.torch.context_parallel import _local  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2)]


def dense_rows(text):
    return any(word.startswith(("bias=", "keep=")) and not word.endswith(("/bk", "/k"))
               for word in text.split())


def draw(seed):
    """(case, size, inner, shards, exchange, groups of heads) of a random problem."""
    rng = random.Random(seed)
    while True:
        text = cp_ranks.random_case(rng, rng.random() < 0.6)
        try:
            with conformance.Case(text) as case:
                whole = cp_ranks.Whole(case)
                hk = whole.flat(whole.given["k"], 1).shape[1]
        except ValueError:  # words that contradict each other
            continue
        size, inner = rng.choice(SIZES)
        rows = dense_rows(text)
        shards = tuple(cp_ranks.random_shards(rng, one, size, rows) for one in whole.lengths)
        if whole.is_self and rng.random() < 0.7:
            shards = shards[0], shards[0]
        exchange = rng.choice(["keys", "heads", "ring", "auto"])
        if rows and (exchange == "heads" or inner > 1):
            exchange = "keys"
        most = {"keys": hk, "heads": -(-hk // size)}.get(exchange, 0)
        groups = rng.randint(1, most) if most else None
        return text, size, inner, shards, exchange, groups


def judge(text, size, inner, shards, exchange, groups=None, **more):
    with conformance.Case(text) as case:
        whole = cp_ranks.Whole(case)
        parts = cp_ranks.Ranks(size, inner).run(lambda rank, group: cp_ranks.part_of(
            whole, shards, rank, group, exchange, groups_of_heads=groups, **more))
        return cp_ranks.verdict(whole, shards, parts)


@pytest.mark.parametrize("block", range(8))
def test_random_problems(block, examples, monkeypatch):
    if block % 4 == 0:  # as on a GPU: parts are merged, and gradients added, one pass more
        monkeypatch.setattr(_local, "adds_in_place", lambda device: False)
    for seed in range(block * examples // 16, (block + 1) * examples // 16):
        problem = draw(seed)
        found = judge(*problem, save_gathered=seed % 3 == 0)
        assert found["passed"], f"seed {seed}: {problem}: {found['failures']}"


@pytest.mark.parametrize("exchange, groups", [("heads", 1), ("heads", 2), ("keys", 1), ("keys", 2)])
@pytest.mark.parametrize("text", [
    "fwd bf16 b=2 s=700 hq=4 hk=2 d=64 layout=thd lens=random:3 causal",
    "fwd fp32 b=1 s=1000 hq=6 hk=2 d=64 layout=thd lens=full window=200,0 softcap=20 align=top_left",
    "fwd bf16 b=3 s=500 hq=8 hk=8 d=128 layout=thd lens=random:5 causal sink=learnable",
    "fwd fp16 b=1 s=900 hq=4 hk=4 d=64 layout=thd lens=full causal dropout=0.1 alibi",
])
def test_o_and_lse_are_one_devices_bits(text, exchange, groups):
    if exchange == "heads" and groups == 2 and "hk=2" in text:
        pytest.skip("a rank has one kv head")
    with conformance.Case(text) as case:
        whole = cp_ranks.Whole(case)
        shards = Shards.zigzag(whole.lengths[0], 3)
        parts = cp_ranks.Ranks(3).run(lambda rank, group: cp_ranks.part_of(
            whole, (shards, shards), rank, group, exchange, groups_of_heads=groups))
        given = {name: cp_ranks.tensor(x) if hasattr(x, "shape") else x
                 for name, x in whole.given.items()}
        given["cu_seqlens_k"] = given["cu_seqlens_q"]
        o, lse = tt.attention(**{**given, "return_lse": True})
        for rank, part in enumerate(parts):
            rows = torch.from_numpy(shards.index(rank))
            assert torch.equal(part["o"], o[rows]) and torch.equal(part["lse"], lse[:, rows])


@pytest.mark.parametrize("exchange", ["heads", "keys", "ring"])
def test_fp8_keys_travel_in_fp8(exchange):
    text = "fwd bf16 b=2 s=200 hq=4 hk=2 d=64 layout=thd lens=random:3 causal kv=e4m3"
    shards = Shards.zigzag([int(n) for n in lengths_of(text)], 3, align=16)
    found = judge(text, 3, 1, (shards, shards), exchange)
    assert found["passed"], found["failures"]


def lengths_of(text):
    with conformance.Case(text) as case:
        return cp_ranks.Whole(case).lengths[0]


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("lengths", [[512, 512], [300, 77]])
def test_padded_layouts(layout, lengths):
    """A padded local batch; what lies behind a sequence's own rows is poison."""
    size, (hq, hk, d) = 3, (4, 2, 16)
    shards = Shards.zigzag(lengths, size)
    torch.manual_seed(0)
    whole = [torch.randn(sum(lengths), h, d) for h in (hq, hk, hk)]
    cu = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
    want, want_lse = tt.attention(*whole, layout="thd", cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True,
                                  return_lse=True)

    def one(rank, group):
        own = shards.extents_of_sequences(rank)
        extent = int(own.max())
        cuts = shards.cu_seqlens(rank)

        def padded(x):
            rows = x[torch.from_numpy(shards.index(rank))]
            out = torch.full((len(lengths), extent, *x.shape[1:]), torch.nan)
            for n in range(len(lengths)):
                out[n, :own[n]] = rows[cuts[n]:cuts[n + 1]]
            return {"bshd": out, "sbhd": out.transpose(0, 1), "bhsd": out.transpose(1, 2)}[layout]
        leaves = [padded(x).requires_grad_() for x in whole]
        o, lse = cp.attention(*leaves, shards=shards, group=group, layout=layout, causal=True,
                              return_lse=True)
        grads = torch.autograd.grad(o.sum(), leaves)
        back = {"bshd": o, "sbhd": o.transpose(0, 1), "bhsd": o.transpose(1, 2)}[layout]
        assert all(torch.isfinite(x).all() for x in grads)
        for n in range(len(lengths)):
            rows = torch.from_numpy(shards.index(rank))[cuts[n]:cuts[n + 1]]
            torch.testing.assert_close(back[n, :own[n]], want[rows])
            torch.testing.assert_close(lse[n, :, :own[n]], want_lse[:, rows])
            assert not back[n, own[n]:].any() and (lse[n, :, own[n]:] == -torch.inf).all()
    cp_ranks.Ranks(size).run(one)


def test_windows_and_documents_travel_little():
    """Rows on the wire: a window fetches its neighbours, whole documents nothing."""
    def received(shards, **keywords):
        x = [torch.randn(sum(shards.lengths), h, 16) for h in (2, 2, 2)]
        ranks = cp_ranks.Ranks(shards.size)
        ranks.run(lambda rank, group: cp.attention(
            *(y[torch.from_numpy(shards.index(rank))] for y in x), shards=shards, group=group,
            layout="thd", exchange="keys", **keywords))
        return max(ranks.boxes[0].bytes) / (2 * 2 * 16 * 4)  # rows of k and v
    slack = 20  # messages of the agreement
    assert received(Shards.contiguous([4096], 4), causal=True, window=(100, 0)) <= 128 + slack
    assert received(Shards.of([[(0, 0, 500)], [(1, 0, 700)]]), causal=True) <= slack
    assert received(Shards.zigzag([4096], 4), causal=True) <= 3072 + slack


@pytest.mark.parametrize("groups", [1, 2])
def test_keys_that_were_kept_are_not_fetched_again(groups):
    def run(save):
        shards, ranks = Shards.zigzag([2048], 4), cp_ranks.Ranks(4)
        torch.manual_seed(0)
        x = [torch.randn(2048, h, 16) for h in (4, 2, 2)]
        ids = torch.arange(2048, dtype=torch.int32) // 700

        def one(rank, group):
            rows = torch.from_numpy(shards.index(rank))
            leaves = [y[rows].requires_grad_() for y in x]
            o = cp.attention(*leaves, shards=shards, group=group, layout="thd", exchange="keys",
                             groups_of_heads=groups, save_gathered=save, causal=True, segment_ids=ids[rows])
            before = ranks.boxes[0].bytes[rank]
            grads = torch.autograd.grad(o.square().sum(), leaves)
            return *grads, before, ranks.boxes[0].bytes[rank] - before
        return ranks.run(one)
    plain, kept = run(False), run(True)
    for one, other in zip(plain, kept):
        assert all(torch.equal(a, b) for a, b in zip(one[:3], other[:3]))
        assert one[3] == other[3]
    # k and v come once more, beside the gradients that return; or only those.
    assert sum(one[4] for one in plain) > 1.9 * sum(one[4] for one in kept) > 0


def test_deterministic_repeats():
    problem = ("bwd bf16 b=2 s=300 hq=6 hk=2 d=32 layout=thd lens=random:1 causal dlse deterministic",
               3, 1)
    with conformance.Case(problem[0]) as case:
        whole = cp_ranks.Whole(case)
        shards = Shards.zigzag(whole.lengths[0], 3, align=16)
        for exchange in ("heads", "keys", "ring"):
            first, again = [cp_ranks.Ranks(3).run(lambda rank, group: cp_ranks.part_of(
                whole, (shards, shards), rank, group, exchange)) for _ in range(2)]
            for a, b in zip(first, again):
                assert all(torch.equal(a[name], b[name]) for name in a)


def refused(size, change, **common):
    """The errors of all ranks, where rank `size` - 1 changes its arguments."""
    shards = Shards.zigzag([300, 77], size)
    texts = [None] * size

    def one(rank, group):
        x = dict(zip("qkv", (torch.randn(shards.extents[rank], h, 16) for h in (4, 2, 2))))
        keywords = dict(shards=shards, group=group, layout="thd", causal=True, **common)
        if rank == size - 1:
            change(x, keywords)
        try:
            cp.attention(**x, **keywords)
        except (ValueError, TypeError, tt.Refused) as error:
            texts[rank] = f"{type(error).__name__}: {error}"
    cp_ranks.Ranks(size).run(one)
    assert None not in texts and len(set(texts)) == 1, f"all ranks must say the same: {texts}"
    return texts[0]


@pytest.mark.parametrize("change, words", [
    (lambda x, kw: kw.update(causal=False), "rank 1 passes causal=False, rank 0 True"),
    (lambda x, kw: kw.update(softcap=3.0), "softcap"),
    (lambda x, kw: kw.update(shards=Shards.contiguous([300, 77], 2)), "rank 1"),
    (lambda x, kw: kw.update(shards=Shards.zigzag([300, 77], 3)), "must be the size of the group, 2"),
    (lambda x, kw: kw.update(shards=None), "shards=NoneType: must be"),
    (lambda x, kw: kw.update(sink="off_by_one"), "sink"),
    (lambda x, kw: kw.update(exchange="ring"), "exchange=ring"),
    (lambda x, kw: kw.update(exchange="p2p"), "exchange='p2p'"),
    (lambda x, kw: kw.update(seqlens_q=torch.ones(2)), "lengths and starts are in shards"),
    (lambda x, kw: kw.update(page_table=torch.ones(2)), "use decode"),
    (lambda x, kw: kw.update(window=(5, 5)), "window=\\(5, 5\\)"),
    (lambda x, kw: kw.update(cauzal=True), "unexpected keyword argument 'cauzal'"),
    (lambda x, kw: kw.update(softmax_scale=-1.0), "softmax_scale"),
    (lambda x, kw: kw.update(keep=torch.ones(1, 1, 200, 5, dtype=torch.bool)), "keep.shape"),
    (lambda x, kw: kw.update(dropout_p=1.5), "dropout_p"),
    (lambda x, kw: kw.update(backend="none"), "backend"),
    (lambda x, kw: x.update(q=x["q"][1:]), r"q.shape\[0\]=\d+: rank 1 holds \d+ tokens of Shards.zig"),
    (lambda x, kw: x.update(k=x["k"].double()), "dtype"),
    (lambda x, kw: x.update(q=x["q"][:, :3]), "must be a multiple of"),
    (lambda x, kw: x.update(q=None), "q=NoneType: must be a PyTorch tensor"),
    (lambda x, kw: x.update(q=x["q"][None]), "must have the axes of"),
])
def test_what_one_rank_refuses_all_refuse(change, words):
    import re
    text = refused(2, change)
    assert re.search(words, text), text


def test_bias_with_rows_is_not_exchanged_by_heads():
    text = refused(2, lambda x, kw: None, exchange="heads", bias=torch.zeros(1, 1, 300, 300))
    assert "use keys" in text


def strided():
    """A view of a tensor that holds more, and sizes that need padding."""
    return [torch.arange(96.0).view(4, 3, 2, 4).unbind(1)[1], torch.arange(10.0), torch.arange(3).byte()]


@pytest.mark.parametrize("x", strided(), ids=["view", "padded", "bytes"])
def test_what_a_stream_of_exchanges_reads_is_kept(monkeypatch, x):
    """With doubles of CUDA's streams. What is freed sooner is the next tensor's memory, and still read."""
    joined, noted, events = [], {}, []
    side = types.SimpleNamespace(wait_stream=lambda _: None, record_event=lambda: "event")
    current = types.SimpleNamespace(wait_event=lambda event: events.append((event, [y() for y in joined])))
    join = comm._joined
    monkeypatch.setattr(comm, "side_stream", lambda *_: side)
    monkeypatch.setattr(comm, "_joined", lambda pieces, *rest: joined.extend(
        weakref.ref(y) for tensors in pieces for y in tensors) or join(pieces, *rest))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: noted.setdefault(x.data_ptr(), stream))
    pending = comm.exchange(cp_ranks.Echo(), [[], [x[...]]], [[], [(x.shape, x.dtype)]], x.device)
    assert torch.equal(pending.wait()[1][0], x)
    (event, alive), = events
    assert event == "event" and alive and all(y is not None for y in alive)
    assert noted[pending._received.data_ptr()] is current
    del alive
    events.clear()
    assert all(y() is None for y in joined), "and no longer"


def test_what_a_planned_exchange_reads_and_writes_is_kept(monkeypatch):
    """With doubles of CUDA's streams: the allocator would give to the caller what is freed before it waited."""
    x, into, events = torch.arange(24.0).view(4, 3, 2)[:, 1:], torch.zeros(4, 2, 2), []
    kept = [weakref.ref(y) for y in (x, into)]
    side = types.SimpleNamespace(wait_stream=lambda _: None, record_event=lambda: "event")
    current = types.SimpleNamespace(wait_event=lambda event: events.append((event, [y() is not None for y in kept])))
    monkeypatch.setattr(comm, "side_stream", lambda *_: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    plan = _messages.Messages(0, 2, [Kind.of(x)], [Kind.of(into)])
    rows = Rows(np.array([3, 0, 1]), x.device)
    plan.send(1, 0, rows)
    plan.receive(1, 0, rows)
    pending = plan.start(cp_ranks.Echo(), [x], [into])
    want, found = x.clone(), into.detach()
    del x, into
    assert pending.wait() == [[], []]
    assert events == [("event", [True, True])]
    assert [y() for y in kept] == [None, None], "and no longer"
    assert torch.equal(found[[3, 0, 1]], want[[3, 0, 1]]) and not found[2].any()


class Late:
    """A group whose other rank sends back what it was sent, which is there when its work is waited for."""
    rank, size, name = 0, 2, "late"

    def all_to_all(self, sent, sizes, received_sizes):
        received = torch.full_like(sent, 255)
        return received, types.SimpleNamespace(wait=lambda: received.copy_(sent))


@pytest.mark.parametrize("overlaps", [True, False])
def test_nothing_is_read_before_it_came(monkeypatch, overlaps):
    """On the stream of exchanges, which waits for the work, or on the caller's, which does so itself."""
    side = types.SimpleNamespace(wait_stream=lambda _: None, record_event=lambda: None)
    monkeypatch.setattr(comm, "side_stream", lambda *_: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: types.SimpleNamespace(wait_event=lambda _: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    x, into = torch.arange(12.0).view(3, 2, 2), torch.zeros(3, 2, 2)
    plan, rows = _messages.Messages(0, 2, [Kind.of(x)], [Kind.of(into)]), Rows(np.arange(3), x.device)
    plan.send(1, 0, rows)
    plan.receive(1, 0, rows)
    assert plan.start(Late(), [x], [into], overlaps).wait() == [[], []]
    assert torch.equal(into, x)
    plan = _messages.Messages(0, 2, [Kind.of(x)])
    plan.send(1, 0, rows)
    plan.read(1, (3, 2, 2), x.dtype)
    _, (found,) = plan.start(Late(), [x], [], overlaps).wait()
    assert torch.equal(found, x)


def test_shard_and_unshard_are_inverse_and_differentiable():
    shards = Shards.te([0, 24, 32], 2, [0, 21, 28])
    x = torch.randn(28, 3)

    def one(rank, group):
        whole = x.clone().requires_grad_()
        part = cp.shard(whole, shards, group, 0)
        assert part.shape[0] == shards.extents[rank]
        assert torch.equal(cp.unshard(part, shards, group, 0), x)
        own, = torch.autograd.grad(part.sum(), whole)
        leaf = part.detach().requires_grad_()
        back, = torch.autograd.grad((cp.unshard(leaf, shards, group, 0) * (rank + 1)).sum(), leaf)
        held = torch.from_numpy(shards.sequence_ids(rank) >= 0)
        assert (back[held] == 3).all() and not back[~held].any()
        assert cp.positions(shards, group).tolist() == shards.positions(rank).tolist()
        return own
    total = sum(cp_ranks.Ranks(2).run(one))
    assert (total == 1).all(), "each row's gradient lies on one rank"


def test_merge_is_the_same_bits_on_every_rank():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, s, 4, 16) for s in (3, 60, 60))
    want = tt.attention(q, k, v, return_lse=True)

    def one(rank, group):
        own = slice(rank * 20, rank * 20 + 20)
        return cp.merge(*tt.attention(q, k[:, own], v[:, own], return_lse=True), group)
    found = cp_ranks.Ranks(3).run(one)
    for o, lse in found:
        torch.testing.assert_close(o, want[0])
        assert torch.equal(o, found[0][0]) and torch.equal(lse, found[0][1])


@pytest.mark.parametrize("interleave, window, sink, paged", [
    (1, None, None, False), (4, (5, 0), "off_by_one", False), (16, (30, 0), None, True),
    (3, None, "off_by_one", False)])
def test_decode(interleave, window, sink, paged):
    """Against the whole cache on one device; what lies behind a part's tokens is poison."""
    size, sq, lengths = 3, 3, torch.tensor([3, 50, 17, 96])
    torch.manual_seed(0)
    q = torch.randn(4, sq, 4, 16)
    k, v = torch.randn(4, 96, 2, 16), torch.randn(4, 96, 2, 24)
    want, want_lse = tt.attention(q, k, v, seqlens_k=lengths, causal=True, align="bottom_right",
                                  window=window and (window[0], -1), sink=sink, return_lse=True)

    def one(rank, group):
        own = [j for j in range(96) if j // interleave % size == rank]
        caches = [torch.full((4, 96, *x.shape[2:]), torch.nan) for x in (k, v)]
        for cache, x in zip(caches, (k, v)):
            for n in range(4):
                held = [j for j in own if j < lengths[n]]
                cache[n, :len(held)] = x[n, held]
        table = None
        if paged:
            table = torch.randperm(4 * 12).view(4, 12).int()
            for i, x in enumerate(caches):
                pool = torch.empty(48, 8, *x.shape[2:])
                pool[table.long()] = x.view(4, 12, 8, *x.shape[2:])
                caches[i] = pool
        return cp.decode(q, *caches, seqlens_k=lengths, group=group, interleave=interleave,
                         window=window, sink=sink, page_table=table, return_lse=True)
    found = cp_ranks.Ranks(size).run(one)
    for o, lse in found:
        torch.testing.assert_close(o, want)
        torch.testing.assert_close(lse, want_lse)
        assert torch.equal(o, found[0][0])


@pytest.mark.parametrize("keywords, words", [
    (dict(alibi_slopes=torch.ones(2)), "alibi_slopes"), (dict(interleave=0), "at least 1"),
    (dict(window=(3, 2)), "left, 0"), (dict(causal=True), "leave it out")])
def test_decode_refuses(keywords, words):
    q = torch.randn(1, 1, 2, 8)
    group = cp_ranks.Ranks(1).group(0)
    with pytest.raises(ValueError, match=words):
        cp.decode(q, q, q, seqlens_k=torch.ones(1, dtype=torch.int64), group=group, **keywords)
