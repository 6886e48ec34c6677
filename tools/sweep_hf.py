# SPDX-License-Identifier: Apache-2.0
"""Every architecture of the installed transformers on tessera beside eager, and their page,
docs/models.md.

    python tools/sweep_hf.py                 all (twenty minutes on a core), and writes the page
    python tools/sweep_hf.py bloom 'qwen*'   some, by their names in transformers; writes nothing
    python tools/sweep_hf.py --check         all; fails if the page is out of date, and writes nothing

Each is built from a tiny random configuration, in a process of its own. It is *right* if forward,
gradients, padding on both sides and generation (greedy, beams, a static cache), as far as eager does
them with these inputs, agree; *refused* if tessera said so; *wrong* otherwise, and then the exit
status is 1. `--json FILE` keeps what each said.
"""

import argparse
import collections
import dataclasses
import fnmatch
import json
import multiprocessing
import sys
import textwrap
import warnings
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python" / "hf"))
PAGE = ROOT / "docs" / "models.md"
STYLE = {"right": "green", "refused": "cyan", "wrong": "bold red", "not built": "dim"}


def one(name: str, answer) -> None:
    """In a process of its own: the outcome of one architecture, sent as a dictionary."""
    import hf_models
    answer.send(dataclasses.asdict(hf_models.compare(name)))


def outcome_of(name: str, seconds: float) -> dict:
    context = multiprocessing.get_context("fork")  # importing transformers takes longer than most models
    answer, ours = context.Pipe(duplex=False)
    process = context.Process(target=one, args=(name, ours), daemon=True)
    process.start()
    ours.close()
    try:
        if answer.poll(seconds):
            return answer.recv()
        return {"kind": "not built", "why": f"takes more than {seconds:.0f} s", "checks": [], "calls": 0}
    except EOFError:
        process.join()
        return {"kind": "wrong", "why": f"the process ended with {process.exitcode}", "checks": [], "calls": 0}
    finally:
        process.kill()
        process.join()


def sweep(names: list[str], seconds: float, console: Console) -> dict[str, dict]:
    found = {}
    with Progress(SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn(),
                  console=console) as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            found[name] = outcome = outcome_of(name, seconds)
            if outcome["kind"] == "wrong":
                console.print(f"{name}: {outcome['why']}", style=STYLE["wrong"])
            progress.advance(task)
    return found


def row_of(outcome: dict) -> str:
    """Which section of the page an outcome belongs to."""
    if outcome["kind"] != "right":
        return outcome["kind"]
    if not outcome["calls"]:
        return "right, and has no attention that tessera could do"
    return "right, generation included" if "greedy" in outcome["checks"] else "right"


ROWS = ("right, generation included", "right", "right, and has no attention that tessera could do", "refused",
        "wrong", "not built")


HEAD = """<!-- Written by tools/sweep_hf.py; do not edit. -->
# Models of transformers

Every architecture of transformers, from a tiny random configuration, on tessera beside eager attention, by its name
there. How they were compared, and how to ask about one, is in [torch.md](torch.md#hugging-face).
"""


def page(found: dict[str, dict]) -> str:
    by_row = collections.defaultdict(list)
    for name, outcome in found.items():
        by_row[row_of(outcome)].append(name)
    sections = [f"## {row[0].upper()}{row[1:]}: {len(by_row[row])}\n\n" + textwrap.fill(
        ", ".join(by_row[row]), 119, break_on_hyphens=False) + "\n" for row in ROWS if by_row[row]]
    return "\n".join([HEAD, *sections])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures, wildcards allowed; none means all")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the table is out of date")
    parser.add_argument("--json", type=Path, help="where to keep what each architecture said")
    parser.add_argument("--seconds", type=float, default=60, help="how long one may take (default 60)")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th architecture from the i-th; writes nothing")
    parser.add_argument("--from-json", type=Path, nargs="+", help="take what earlier runs kept, and run nothing")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    console = Console(stderr=True)
    if options.from_json:
        found = dict(sorted({k: v for path in options.from_json
                             for k, v in json.loads(path.read_text()).items()}.items()))
    else:
        import hf_models
        import transformers
        transformers.logging.set_verbosity(100)
        names = [name for name in hf_models.architectures()
                 if not options.names or any(fnmatch.fnmatch(name, each) for each in options.names)]
        i, n = map(int, options.part.split("/"))
        found = sweep(names[i::n], options.seconds, console)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    counts = collections.Counter(outcome["kind"] for outcome in found.values())
    for kind, style in STYLE.items():
        console.print(f"{counts[kind]:5} {kind}", style=style)
    if len(found) < 12:
        for name, outcome in found.items():
            console.print(f"{name}: {outcome['kind']} {outcome['why']} {', '.join(outcome['checks'])}")
    if options.names or options.part != "0/1":
        return bool(counts["wrong"])
    new = page(found)
    is_old = options.check and PAGE.read_text() != new
    if is_old:
        print("docs/models.md is out of date: python tools/sweep_hf.py")
    elif not options.check:
        PAGE.write_text(new)
    return bool(counts["wrong"]) or is_old


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
