# SPDX-License-Identifier: Apache-2.0
"""python -m tessera: env, explain, mask, check, bench, demo."""

from __future__ import annotations

import argparse
import os
import sys

EPILOG = """\
examples:
  python -m tessera env
  python -m tessera explain "fwd bf16 b=2 s=1024 h=16 d=128 causal"
  python -m tessera mask "fwd fp32 b=1 s=16 h=1 d=8 window=4,0 align=top_left"
  python -m tessera check "bwd fp32 b=1 s=257 h=3 d=40 window=16,0 softcap=30"
  python -m tessera bench "fwd bf16 b=1 s=2048 h=8 d=128" --against torch
  python -m tessera demo
`python -m tessera COMMAND --help` explains each command."""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["demo"]:
        from . import demo
        return demo.main(argv[1:]) or 0
    from .cli import bench, case_lines, check, env, explain, mask
    parser = argparse.ArgumentParser(prog="python -m tessera", description="Dot-product attention, "
                                     "forward and backward, on CPU and NVIDIA GPUs.", epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (env, explain, mask, check, bench):
        module.add_parser(commands)
    commands.add_parser("demo", help="run a real sentence model on the CPU, in a minute")
    args = parser.parse_args(argv)
    try:
        return args.main(args)
    except case_lines.UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except (ValueError, RuntimeError, MemoryError) as error:
        if not str(error).startswith("tessera."):
            raise  # ours to mend, not the user's
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # the reader, `head` say, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
