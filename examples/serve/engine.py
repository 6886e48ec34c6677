# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: requests join and leave between any two steps of one model.

A step is one forward pass over one packed row [1, t]: the next token of every sequence that generates,
and beside them chunks of the prompts of those that do not yet. Keys and values live in pools of pages,
[pages, page_size, heads, head_dim] a layer; append_kv writes behind what a sequence has there, and
attention of the packed queries reads it, each sequence through its row of a page table.
"""
from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable

import torch
from pages import Pages
from transformers import AttentionInterface, AttentionMaskInterface

from tessera.torch import append_kv, attention

NAME = "tessera_serve"


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt and what follows it."""
    id: int
    tokens: list[int]                 # the prompt, then what was generated
    prompt: int                       # how many of them are the prompt
    most: int                         # tokens to generate
    stop: frozenset[int]              # tokens that end it
    on_token: Callable[[Request, int], None]
    temperature: float = 0.0          # 0: the likeliest token
    generator: torch.Generator | None = None
    cached: int = 0                   # tokens whose keys and values are in pages
    pages: list[int] = dataclasses.field(default_factory=list)

    @property
    def new(self) -> list[int]:
        return self.tokens[self.prompt:]

    @property
    def generates(self) -> bool:
        """Whether all but the last token are cached."""
        return len(self.tokens) - self.cached == 1


@dataclasses.dataclass
class Batch:
    """What attention of a step is told: lengths int32 [b], page_table int32 [b, pages]."""
    pools: list[tuple[torch.Tensor, torch.Tensor]]
    page_table: torch.Tensor
    cu_seqlens: torch.Tensor          # int32 [b + 1], of the packed row
    longest: int
    before: torch.Tensor              # tokens of each sequence in its pages
    after: torch.Tensor
    clock: Clock


class Clock:
    """Seconds by what they went to. On a GPU it waits for the device at both ends of each."""

    def __init__(self, device: torch.device):
        self.seconds: collections.Counter[str] = collections.Counter()
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    @contextlib.contextmanager
    def of(self, what: str):
        self._wait()
        begin = time.perf_counter()
        yield
        self._wait()
        self.seconds[what] += time.perf_counter() - begin


def paged_attention(module, query, key, value, attention_mask, scaling=None, sliding_window=None,
                    softcap=None, s_aux=None, batch: Batch | None = None, **_):
    """transformers' attention function: query, key, value [1, h, t, d], turned -> (o [1, t, h, d], None)."""
    if batch is None:
        raise ValueError(f"{type(module).__name__}: batch=None: this model does not hand keywords on to its "
                         "attention; serve another, or generate() without an Engine")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [t, h, d], as projections lay it out
    pools = batch.pools[module.layer_idx]
    with batch.clock.of("append_kv"):
        append_kv(k, v, *pools, batch.before, layout="thd", cu_seqlens=batch.cu_seqlens,
                  page_table=batch.page_table)
    with batch.clock.of("attention"):
        o = attention(q, *pools, layout="thd", cu_seqlens_q=batch.cu_seqlens, max_seqlen_q=batch.longest,
                      seqlens_k=batch.after, page_table=batch.page_table, causal=True, align="bottom_right",
                      window=None if sliding_window is None else (sliding_window - 1, 0),
                      softmax_scale=scaling, softcap=softcap or 0.0, sink=s_aux)
    return o[None], None


AttentionInterface.register(NAME, paged_attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)  # lengths and the page table say it all


class Engine:
    """Serves requests on a decoder of transformers, built with attn_implementation=engine.NAME.

    At most `batch` sequences run at a time, of at most `budget` tokens a step, in `pages` pages of
    `page_size` tokens. A sequence that finds no page sends the youngest back to the queue, whose keys
    and values are computed again later: what it has generated is kept.
    """

    def __init__(self, model, *, pages: int = 256, page_size: int = 16, batch: int = 16, budget: int = 128):
        config = model.config.get_text_config()
        parameter = next(model.parameters())
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.model, self.device = model, parameter.device
        self.most_sequences, self.budget = batch, budget
        self.pages = Pages(pages, page_size)
        self.pools = [tuple(torch.zeros(pages, page_size, heads, width, dtype=parameter.dtype,
                                        device=self.device) for _ in "kv")
                      for _ in range(config.num_hidden_layers)]
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []   # the oldest first
        self.clock = Clock(self.device)
        self.counts: collections.Counter[str] = collections.Counter()
        self._ids = itertools.count()

    def submit(self, prompt: list[int], most: int, on_token=lambda request, token: None, *,
               stop=(), temperature: float = 0.0, seed: int = 0) -> Request:
        """Queues a prompt; on_token(request, token) is called for each of at most `most` tokens as it comes,
        one of `stop` being the last."""
        if not prompt or most < 1:
            raise ValueError(f"Engine.submit: prompt of {len(prompt)} tokens, most={most}: both must be at least 1")
        needed = self.pages.needed(len(prompt) + most - 1)
        if needed > self.pages.count:
            raise ValueError(f"Engine.submit: {len(prompt)} tokens and {most} to come need {needed} pages: there "
                             f"are {self.pages.count}; build the Engine with more pages")
        generator = torch.Generator().manual_seed(seed) if temperature else None
        request = Request(next(self._ids), list(prompt), len(prompt), most, frozenset(stop), on_token,
                          temperature, generator)
        self.waiting.append(request)
        return request

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One forward pass; returns the requests that are done with it."""
        with self.clock.of("schedule"):
            self._join()
            plan = self._plan()
            batch, ids, positions = self._packed(plan)
        with self.clock.of("model"):  # attention and append_kv are in here too
            last = batch.cu_seqlens[1:].long() - 1
            logits = self.model(input_ids=ids, position_ids=positions, batch=batch, use_cache=False,
                                logits_to_keep=last).logits[0]
        if "attention" not in self.clock.seconds:
            raise ValueError(f"Engine: {type(self.model).__name__}: its attention does not go through transformers' "
                             "attention interface; serve another model")
        with self.clock.of("choose"):
            logits = logits.float().cpu()
            done = [request for (request, new), scores in zip(plan.items(), logits)
                    if self._advance(request, new, scores)]
        self.counts["steps"] += 1
        return done

    def run(self) -> list[Request]:
        """Steps until nothing is left."""
        done = []
        while self.waiting or self.running:
            done += self.step()
        return done

    # ---- below: how ----

    def _join(self):
        """Takes requests in as long as pages for all that they hold are neither used nor promised."""
        while self.waiting and len(self.running) < self.most_sequences:
            request = self.waiting[0]
            shared = self.pages.shared(request.tokens)
            promised = sum(self.pages.needed(len(each.tokens)) - len(each.pages) for each in self.running)
            if self.pages.needed(len(request.tokens)) - len(shared) > self.pages.free - promised:
                self.pages.release(shared)
                return
            request.pages, request.cached = shared, len(shared) * self.pages.size
            self.counts["shared tokens"] += request.cached
            self.running.append(self.waiting.popleft())

    def _plan(self) -> dict[Request, int]:
        """New tokens of each sequence of the step: those that generate first, so that no prompt delays
        them, then prompts in the order in which they came, in chunks."""
        plan: dict[Request, int] = {}
        left = self.budget
        for request in sorted(self.running, key=lambda request: not request.generates):
            new = min(len(request.tokens) - request.cached, left)
            if new and request in self.running and self._room(request, new, plan):
                plan[request] = new
                left -= new
        return plan

    def _room(self, request: Request, new: int, plan) -> bool:
        """Whether `request` has pages for `new` tokens; younger sequences go back to the queue for it."""
        while True:
            missing = self.pages.needed(request.cached + new) - len(request.pages)
            taken = self.pages.take(max(missing, 0))
            if taken is not None:
                request.pages += taken
                return True
            youngest = self.running[-1]
            self._send_back(youngest)
            plan.pop(youngest, None)
            if youngest is request:  # never the only one: submit() has seen that one fits
                return False

    def _send_back(self, request: Request):
        self.pages.release(request.pages)
        request.pages, request.cached = [], 0
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.counts["sent back"] += 1

    def _packed(self, plan: dict[Request, int]):
        """The Batch, ids [1, t] and positions [1, t] of a step."""
        def ints(values):
            return torch.tensor(values, dtype=torch.int32).to(self.device)
        width = max(len(request.pages) for request in plan)
        table = [request.pages + [0] * (width - len(request.pages)) for request in plan]
        ends = list(itertools.accumulate(plan.values(), initial=0))
        before = [request.cached for request in plan]
        after = [request.cached + new for request, new in plan.items()]
        batch = Batch(self.pools, ints(table), ints(ends), max(plan.values()), ints(before), ints(after), self.clock)
        ids = [token for request, new in plan.items()
               for token in request.tokens[request.cached:request.cached + new]]
        positions = [place for a, b in zip(before, after) for place in range(a, b)]
        return batch, ints([ids]).long(), ints([positions]).long()

    def _advance(self, request: Request, new: int, scores: torch.Tensor) -> bool:
        """`new` tokens of a sequence are cached now; scores [vocabulary] are of the token behind them.
        Returns whether it is done."""
        begin, request.cached = request.cached, request.cached + new
        self.pages.publish(request.tokens, request.pages, begin, request.cached)
        self.counts["tokens"] += new
        if request.cached < len(request.tokens):  # more of the prompt is to come
            return False
        request.tokens.append(_chosen(request, scores))
        self.counts["new tokens"] += 1
        request.on_token(request, request.tokens[-1])
        if len(request.new) < request.most and request.tokens[-1] not in request.stop:
            return False
        self.running.remove(request)
        self.pages.release(request.pages)
        request.pages = []
        return True


def _chosen(request: Request, scores: torch.Tensor) -> int:
    if not request.temperature:
        return int(scores.argmax())
    weights = (scores / request.temperature).softmax(0)
    return int(torch.multinomial(weights, 1, generator=request.generator))
