# SPDX-License-Identifier: Apache-2.0
"""python -m tessera explain: which backend runs a case, and why the others do not."""

from __future__ import annotations

import argparse
import json
import sys

from . import case_lines, terminal

EPILOG = """\
examples:
  python -m tessera explain "fwd bf16 b=2 s=1024 h=16 d=128 causal"
  python -m tessera explain "bwd fp16 b=4 s=300 h=8 d=64 layout=thd lens=random:7" --device sm90
You need neither the device nor a build for it: every build has the rules and tables of all backends. The exit
status is 1 if no backend can run a case. docs/cases.md describes the language of cases."""


def add_parser(commands):
    parser = commands.add_parser("explain", help="say which backend runs a case, and why the others do not",
                                 description=__doc__, epilog=EPILOG,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="+", help="a case line")
    parser.add_argument("--device", default="cpu",
                        choices=["cpu", "sm80", "sm89", "sm90", "sm100", "sm120"],
                        help="the device to ask about: sm80 is A100, sm89 RTX 40 and L4, sm90 H100 and H200, sm100 "
                             "B200, sm120 RTX 50 (default: cpu)")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of tables")
    parser.set_defaults(main=main)


def main(args) -> int:
    import tessera
    answers = [tessera.explain(case, device=args.device) for case in case_lines.split(args.case)]
    if args.json:
        print(json.dumps([answer.answer for answer in answers], indent=2))
        return _status(answers)
    for answer in answers:
        if not terminal.is_rich(sys.stdout):
            print(answer)
            continue
        terminal.print_table(["<backend", "<answer"], answer.rows(), answer.headline)
        if answer.suggestion:
            print(f"try: {answer.suggestion}")
    return _status(answers)


def _status(answers) -> int:
    """1 if no backend can run one of the cases."""
    return int(any(answer.backend is None for answer in answers))
