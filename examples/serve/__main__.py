# SPDX-License-Identifier: Apache-2.0
# example (torch): a server that batches continuously, over pages of keys and values
"""Serve many requests at once on one decoder, with tessera's paged attention: continuous batching.

Requests arrive one after the other, join the batch between two steps, and leave it as they finish.
Each step is one forward pass over a packed row: one token of every sequence that generates, and chunks
of the prompts that have just come. Keys and values live in pages, which sequences with the same
beginning share; where pages run out the youngest sequence waits and is computed again."""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import engine
import small_model
import torch
from small_model import ROOT, Bytes

EPILOG = """\
examples:
  ./dev example serve                               12 requests; the small model is trained first
  ./dev example serve "Attention is" --new 200      one answer, streamed
  ./dev example serve --check                       ... and every answer again, one request at a time
  ./dev example serve --pages 24 --check            too few pages: sequences are sent back, answers stay
  ./dev example serve --budget 16                   short steps: prompts delay the others less
  ./dev example serve --model ~/models/my-llama     a decoder of transformers on disk, with its tokenizer

Read engine.py for how: Engine.step is the loop, paged_attention the two calls of tessera. The last table
says where the time went; `rest of the model` is projections, norms and the MLP, which are PyTorch's.
Without --model, a byte-level Llama of 0.4 million parameters is trained on docs/*.md for half a minute:
its answers are the right ones of a model that knows nothing. Its weights are kept in build/serve."""


def parse(arguments=None):
    parser = argparse.ArgumentParser(prog="examples/serve", description=__doc__, epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", help="your own; without any, pieces of the documents")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a causal model saved by transformers")
    parser.add_argument("--train-steps", type=int, default=400, metavar="N",
                        help="of the small model (default: %(default)s; 0: random weights, gibberish)")
    parser.add_argument("--requests", type=int, default=12, metavar="N", help="without prompts (default: %(default)s)")
    parser.add_argument("--every", type=int, default=2, metavar="STEPS",
                        help="steps between two arrivals (default: %(default)s; 0: all at once)")
    parser.add_argument("--new", type=int, default=48, metavar="TOKENS",
                        help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): the likeliest token")
    parser.add_argument("--batch", type=int, default=8, help="most sequences of a step (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=64, metavar="TOKENS",
                        help="most tokens of a step; longer prompts go in chunks (default: %(default)s)")
    parser.add_argument("--pages", type=int, default=128, help="of the pool (default: %(default)s)")
    parser.add_argument("--page-size", type=int, default=16, metavar="TOKENS", help="default: %(default)s")
    parser.add_argument("--check", action="store_true", help="generate each answer again, alone and with "
                        "transformers' own attention; fails where a token differs")
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="of the CPU (default: PyTorch's choice)")
    args = parser.parse_args(arguments)
    for name in ("requests", "new", "batch", "budget", "pages", "page_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}={getattr(args, name)}: must be at least 1")
    if args.model is not None and not args.model.is_dir():
        parser.error(f"--model={args.model}: is no folder; save_pretrained() of a model and its tokenizer makes one")
    if args.check and args.temperature:
        parser.error("--check: compares the likeliest tokens; leave --temperature out")
    return args


def load(args, attention: str):
    """(model, tokenizer, tokens that end an answer)."""
    if args.model is None:
        model = small_model.load(attention, args.train_steps, ROOT / "build/serve",
                                 lambda step, loss: status.show(f"training: step {step} of {args.train_steps}, "
                                                                f"loss {loss:.2f}", last=step == args.train_steps))
        return model.to(args.device), Bytes(), ()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation=attention)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends] if ends is not None else []
    return model.to(args.device).eval(), AutoTokenizer.from_pretrained(args.model), ends


def pieces(count: int) -> list[str]:
    """Beginnings to go on from: lines of the documents, every third one told what came before it too."""
    lines = [line for line in small_model.text().splitlines() if line[:1].isalpha() and len(line) > 60]
    lines = lines[::max(len(lines) // count, 1)][:count]
    common = small_model.text()[:96]
    return [common + "\n" + line[:40] if i % 3 == 0 else line[:10 + 7 * i % 50] for i, line in enumerate(lines)]


class Status:
    """Lines on stderr that the next ones replace; in a pipe the first of them, every two seconds."""
    drawn, said = 0, 0.0

    def show(self, *lines: str, last=False):
        if sys.stderr.isatty():
            up = f"\x1b[{self.drawn}F" if self.drawn else ""
            self.drawn = 0 if last else len(lines)
            print(up + "\x1b[J" + "\n".join(line[:100] for line in lines), file=sys.stderr, flush=True)
        elif last or time.monotonic() - self.said > 2:
            self.said = time.monotonic()
            print(lines[0], file=sys.stderr, flush=True)


status = Status()


class Answers:
    """What is seen of answers while they come: of one, its text; of many, the end of each that runs."""

    def __init__(self, tokenizer, alone: bool):
        self.tokenizer, self.alone = tokenizer, alone

    def on_token(self, request, token):
        if self.alone:  # a token may be a part of a letter, which the next one changes
            before, now = (self.tokenizer.decode(part) for part in (request.new[:-1], request.new))
            print(now[len(before):] if now.startswith(before) else now[-1:], end="", flush=True)

    def step(self, server, done, total: int, seconds: float):
        if self.alone:
            return
        used = server.pages.count - server.pages.free
        first = f"step {server.counts['steps']}: {len(server.running)} run, {len(server.waiting)} wait, " \
                f"{len(done)} of {total} done; {used} of {server.pages.count} pages; " \
                f"{server.counts['new tokens'] / seconds:.0f} tokens/s"
        status.show(first, *(f"[{each.id}] {len(each.new):4} {self.tokenizer.decode(each.tokens)[-80:]!r}"
                             for each in server.running), last=len(done) == total)

    def whole(self, request):
        if not self.alone:
            tokens = request.tokens
            prompt, answer = map(self.tokenizer.decode, (tokens[:request.prompt], tokens[request.prompt:]))
            print(f"[{request.id}] {prompt!r}\n    -> {answer!r}")


def serve(server: engine.Engine, submit, arrivals, every: int, answers: Answers):
    """Runs until all of `arrivals` are answered; returns the requests as they finished, and seconds."""
    begin, done, arrivals = time.perf_counter(), [], list(arrivals)
    total = len(arrivals)
    while arrivals or server.waiting or server.running:
        while arrivals and (not every or server.counts["steps"] >= every * (total - len(arrivals)) or
                            not (server.waiting or server.running)):
            submit(arrivals.pop(0))
        done += server.step()
        answers.step(server, done, total, time.perf_counter() - begin)
    return done, time.perf_counter() - begin


def report(server: engine.Engine, seconds: float):
    counts, spent = server.counts, server.clock.seconds
    print(f"\n{counts['new tokens']} tokens in {seconds:.2f} s: {counts['new tokens'] / seconds:.0f} tokens/s. "
          f"{counts['steps']} steps of {counts['tokens'] / counts['steps']:.1f} tokens; {counts['shared tokens']} "
          f"tokens found in shared pages; {counts['sent back']} times a sequence was sent back.")
    rest = spent["model"] - spent["attention"] - spent["append_kv"]
    rows = [("attention", spent["attention"]), ("append_kv", spent["append_kv"]), ("rest of the model", rest),
            ("choosing tokens", spent["choose"]), ("scheduling", spent["schedule"])]
    rows.append(("printing and waiting", seconds - sum(each for _, each in rows)))
    for name, each in rows:
        print(f"  {name:22}{1e3 * each / counts['steps']:8.3f} ms a step {100 * each / seconds:5.1f} %")


def check(args, done) -> tuple[int, float]:
    """How many answers differ from those of transformers' own attention, one at a time, and seconds."""
    model, tokenizer, _ = load(args, "eager")
    wrong, begin = 0, time.perf_counter()
    for number, request in enumerate(done, 1):
        prompt = torch.tensor([request.tokens[:request.prompt]], device=args.device)
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.most,
                               do_sample=False, pad_token_id=0)[0].tolist()
        if alone != request.tokens:
            wrong += 1
            print(f"[{request.id}] alone: {tokenizer.decode(alone[request.prompt:])!r}")
        status.show(f"checked {number} of {len(done)}", last=number == len(done))
    return wrong, time.perf_counter() - begin


def main(arguments=None) -> int:
    args = parse(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer, ends = load(args, engine.NAME)
    server = engine.Engine(model, pages=args.pages, page_size=args.page_size, batch=args.batch, budget=args.budget)
    prompts = args.prompts or pieces(args.requests)
    alone = len(prompts) == 1
    answers = Answers(tokenizer, alone)

    def submit(numbered):
        number, text = numbered
        server.submit(tokenizer.encode(text), args.new if alone else max(args.new * (2 + number % 3) // 4, 1),
                      answers.on_token, stop=ends, temperature=args.temperature, seed=number)
    if alone:
        print(prompts[0], end="", flush=True)
    try:
        done, seconds = serve(server, submit, enumerate(prompts), args.every, answers)
    except ValueError as error:
        print(f"examples/serve: {error}", file=sys.stderr)
        return 2
    for request in sorted(done, key=lambda request: request.id):
        answers.whole(request)
    report(server, seconds)
    if not args.check:
        return 0
    wrong, alone_seconds = check(args, done)
    print(f"one request at a time: {server.counts['new tokens'] / alone_seconds:.0f} tokens/s; "
          f"{len(done) - wrong} of {len(done)} answers are the same")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
