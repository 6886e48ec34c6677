# SPDX-License-Identifier: Apache-2.0
"""examples/serve: tokens of continuous batching are those of one request at a time; and random schedules
over pages against attention over what each sequence has seen."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tessera.torch as tt  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "serve"


@pytest.fixture(scope="module")
def serve():
    """The example's __main__, with its siblings."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        spec = importlib.util.spec_from_file_location("serve_main", EXAMPLE / "__main__.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(EXAMPLE))


SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, vocab_size=64, max_position_embeddings=128,
             tie_word_embeddings=False)
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, eos_token_id=7),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, sliding_window=6, query_pre_attn_scalar=8,
                                                attn_logit_softcapping=2.0, eos_token_id=7),
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request, serve):
    """(eager, served): one random model twice."""
    models = []
    for name in ("eager", serve.engine.NAME):
        torch.manual_seed(0)
        models.append(transformers.AutoModelForCausalLM.from_config(
            MODELS[request.param](), attn_implementation=name).eval())
    with torch.no_grad():  # random weights say the same token again and again
        for model in models:
            generator = torch.Generator(torch.get_default_device()).manual_seed(1)
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return models


@pytest.fixture(scope="module")
def answered(pair):
    """[(prompt, most, what one request at a time gives)], some prompts with common beginnings."""
    rng, cases = random.Random(3), []
    common = [[rng.randrange(8, 64) for _ in range(11)] for _ in range(2)]
    for i in range(8):
        prompt = common[i % 2][:rng.randrange(12)] + [rng.randrange(8, 64) for _ in range(rng.randrange(1, 9))]
        ids, most = torch.tensor([prompt]), rng.randrange(1, 16)
        cases.append((prompt, most, pair[0].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False,
            pad_token_id=0)[0].tolist()))
    return cases


@pytest.mark.parametrize("limits", [
    dict(pages=64, page_size=4, batch=8, budget=16), dict(pages=12, page_size=4, batch=5, budget=9),
    dict(pages=9, page_size=5, batch=3, budget=64), dict(pages=48, page_size=1, batch=8, budget=32)], ids=str)
def test_answers_are_those_of_one_request_at_a_time(serve, pair, answered, limits):
    """Requests arrive at random, more of them than there is room for."""
    rng = random.Random(4)
    server, streamed = serve.engine.Engine(pair[1], **limits), {}
    done, requests, arrivals = [], [], list(answered)
    while arrivals or server.waiting or server.running:
        while arrivals and (rng.random() < 0.5 or not (server.waiting or server.running)):
            requests.append(server.submit(*arrivals.pop(0)[:2], lambda request, token: streamed.setdefault(
                request.id, []).append(token), stop=[7]))
        done += server.step()
        held = [page for request in server.running for page in request.pages]
        assert len(set(held)) + server.pages.free == limits["pages"]
        assert len(server.running) <= limits["batch"]
    assert sorted(request.id for request in done) == list(range(8))
    for request, (_, _, expected) in zip(requests, answered):
        assert request.tokens == expected and streamed[request.id] == request.new
    assert server.pages.free == limits["pages"] and not server.pages._known
    assert server.counts["sent back"] or limits["pages"] != 12
    assert server.counts["shared tokens"] or limits["pages"] < 48


def test_sampling_does_not_depend_on_the_company(serve, pair):
    prompt, answers = [9, 10, 11, 12, 13], []
    for others in range(3):
        server = serve.engine.Engine(pair[1], pages=32, page_size=4, batch=4, budget=8)
        for n in range(others):
            server.submit([20 + n] * 6, 5)
        mine = server.submit(prompt, 6, temperature=1.0, seed=5)
        server.run()
        answers.append(mine.new)
    assert answers[0] == answers[1] == answers[2]


def test_requests_that_cannot_be_served_are_named(serve, pair):
    server = serve.engine.Engine(pair[1], pages=3, page_size=4)
    with pytest.raises(ValueError, match="need 4 pages: there are 3"):
        server.submit([9] * 10, 5)
    with pytest.raises(ValueError, match="prompt of 0 tokens"):
        server.submit([], 5)
    assert not server.waiting


def test_the_command(serve, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serve, "ROOT", tmp_path)
    few = ["--train-steps=2", "--requests=4", "--new=6", "--device=cpu"]
    assert serve.main([*few, "--check", "--pages=30"]) == 0
    printed = capsys.readouterr()
    assert "4 of 4 answers are the same" in printed.out and "tokens/s" in printed.out
    for part in ("attention", "append_kv", "rest of the model"):
        assert f"  {part} " in printed.out
    assert "training: step 2 of 2" in printed.err and "4 of 4 done" in printed.err
    assert list((tmp_path / "build" / "serve").iterdir())
    assert serve.main([*few[:1], "--new=5", "--temperature=1", "Say "]) == 0  # streamed, trained before
    printed = capsys.readouterr()
    assert printed.out.startswith("Say ") and "training" not in printed.err
    assert serve.main([*few, "--pages=1"]) == 2
    assert "build the Engine with more pages" in capsys.readouterr().err
    for wrong in (["--check", "--temperature=1"], ["--pages=0"], [f"--model={tmp_path / 'none'}"]):
        with pytest.raises(SystemExit):
            serve.main(wrong)
    printed = capsys.readouterr().err
    assert "leave --temperature out" in printed and "--pages=0: must be" in printed and "is no folder" in printed


def test_a_model_that_attends_by_itself_is_named(serve, pair):
    server = serve.engine.Engine(pair[0], pages=8, page_size=4)
    server.submit([9, 10], 2)
    with pytest.raises(ValueError, match="does not go through transformers' attention interface"):
        server.step()


# ---- schedules over pages, without a model ----

HQ, HK, D, PAGE, ROOM = 4, 2, 8, 4, 40
NOTHING = 60  # a page of anything finite, in the place of pages that a window has left behind


class Sequences:
    """A pool, its sequences, and what each of them has seen: keys and values [tokens, HK, D]."""

    def __init__(self, rng, window=None):
        self.rng, self.window = rng, window
        self.pool = torch.full((2, NOTHING + 1, PAGE, HK, D), torch.nan)
        self.pool[:, NOTHING] = 1e6
        self.free, self.users = list(range(NOTHING)), [0] * NOTHING
        self.tables, self.seen = {}, {}

    def take(self) -> int:
        page = self.free.pop(self.rng.randrange(len(self.free)))
        self.users[page] = 1
        return page

    def leave(self, page: int):
        self.users[page] -= 1
        if not self.users[page]:
            self.free.append(page)
            self.pool[:, page] = torch.nan

    def fork(self, id, parent):
        """A sequence that begins as the full pages of another."""
        pages = self.rng.randrange(len(self.seen[parent][0]) // PAGE + 1)
        table = self.tables[parent][:pages]
        if None in table:
            table = []
        for page in table:
            self.users[page] += 1
        self.tables[id] = list(table)
        self.seen[id] = self.seen[parent][:, :len(table) * PAGE].clone()

    def step(self, plan: dict[int, int]):
        """New tokens of sequences go into the pool and attend; some of the last are then rejected."""
        ids = list(plan)
        new = {id: torch.randn(2, count, HK, D) for id, count in plan.items()}
        q = torch.randn(sum(plan.values()), HQ, D)
        before = [self.seen[id].shape[1] for id in ids]
        for id, length in zip(ids, before):
            while len(self.tables[id]) * PAGE < length + plan[id]:
                self.tables[id].append(self.take())
        table = torch.tensor([[NOTHING if page is None else page for page in self.tables[id]] +
                              [2**31 - 1] * (ROOM // PAGE - len(self.tables[id])) for id in ids], dtype=torch.int32)
        cu = torch.tensor([0, *plan.values()]).cumsum(0).to(torch.int32)
        before = torch.tensor(before, dtype=torch.int32)
        k, v = torch.cat([new[id] for id in ids], 1)
        tt.append_kv(k, v, *self.pool, before, layout="thd", cu_seqlens=cu, page_table=table)
        band = dict(causal=True, align="bottom_right", window=self.window)
        o = tt.attention(q, *self.pool, layout="thd", cu_seqlens_q=cu, max_seqlen_q=max(plan.values()),
                         seqlens_k=before + cu.diff(), page_table=table, **band)
        for n, id in enumerate(ids):
            seen = torch.cat((self.seen[id], new[id]), 1)
            expected = tt.attention(q[None, cu[n]:cu[n + 1]], *seen[:, None], **band)[0]
            torch.testing.assert_close(o[cu[n]:cu[n + 1]], expected, rtol=1e-5, atol=2e-6)
            self.reject(id, seen, plan[id])
        return o

    def reject(self, id, seen, new: int):
        """Drafted tokens, all but the first, may go; pages that are empty then are free, and so are those
        that the window has left behind."""
        keep = seen.shape[1] - self.rng.randrange(new)
        self.seen[id] = seen[:, :keep]
        table = self.tables[id]
        while (len(table) - 1) * PAGE >= keep:
            self.leave(table.pop())
        if self.window is not None:
            for i in range(max(keep - self.window[0], 0) // PAGE):
                if table[i] is not None:
                    self.leave(table[i])
                    table[i] = None

    def end(self, id):
        for page in self.tables.pop(id):
            if page is not None:
                self.leave(page)
        del self.seen[id]


@pytest.mark.parametrize("window", [None, (6, 0)])
@pytest.mark.parametrize("seed", range(3))
def test_random_schedules(seed, window):
    """Joins, leaves, shared beginnings, rejected drafts, evicted pages; the order changes every step."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sequences, next_id = Sequences(rng, window), 0
    for _ in range(25):
        plan = {}
        for id in list(sequences.seen):
            if sequences.seen[id].shape[1] > ROOM - 6 or rng.random() < 0.1:
                sequences.end(id)
            elif rng.random() < 0.85:  # the others wait for a step
                plan[id] = rng.randrange(1, 6)
        while len(sequences.seen) < 5 and rng.random() < 0.6:
            if sequences.seen and rng.random() < 0.5:
                sequences.fork(next_id, rng.choice(list(sequences.seen)))
            else:
                sequences.tables[next_id], sequences.seen[next_id] = [], torch.empty(2, 0, HK, D)
            plan[next_id] = rng.randrange(1, 11)
            next_id += 1
        plan = {id: min(count, ROOM - sequences.seen[id].shape[1]) for id, count in
                rng.sample(list(plan.items()), len(plan))}
        if plan:
            sequences.step({id: count for id, count in plan.items() if count})
    for id in list(sequences.seen):
        sequences.end(id)
    assert sorted(sequences.free) == list(range(NOTHING)) and next_id > 10
