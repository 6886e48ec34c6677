# SPDX-License-Identifier: Apache-2.0
"""python -m tessera check: run cases against the fp64 reference, under one error rule."""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import importlib.util
import os
import shlex
import sys

from .. import _lib
from . import case_lines, terminal

EPILOG = """\
examples:
  python -m tessera check                                    (the smoke cases, through NumPy)
  python -m tessera check "bwd fp32 b=1 s=257 h=3 d=40 window=16,0 softcap=30"
  python -m tessera check --cases ci --through c --backend cpu
  python -m tessera check --cases nightly --through c --device cuda --kernel "sm90/backward/d128_*"
A failure prints one line that you can paste back. A refusal fails too if tests/cases/refused.<backend> and
refused.<device> have no rule for it, and so does a case that runs although they have one. docs/cases.md
describes the language of cases."""

_THROUGH = ("numpy", "c", "torch", "jax", "paddle")
_ISAS = ("portable", "avx2", "avx512", "avx512bf16", "amx")


def add_parser(commands):
    parser = commands.add_parser("check", help="run cases against the fp64 reference",
                                 description=__doc__, epilog=EPILOG,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help="a case line")
    parser.add_argument("--cases", metavar="FILE", action="append", default=[],
                        help="a file of cases, or smoke, ci or nightly")
    parser.add_argument("--backend", help="force a backend by name")
    parser.add_argument("--through", choices=_THROUGH, default="numpy",
                        help="the front end that runs them (default: numpy; without the package "
                        "ml_dtypes, numpy runs bf16 and fp8 through C)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="use at most N threads")
    parser.add_argument("--isa", choices=_ISAS, help="limit the CPU's kernels to this instruction set")
    parser.add_argument("--kernel", metavar="NAME",
                        help="only cases that run in a kernel of this name, as explain shows it; * and ? are wildcards")
    parser.add_argument("--refused", metavar="FILE",
                        help="rules for what is refused (default: tests/cases/refused.<device> and .<backend>)")
    parser.set_defaults(main=main)


def main(args) -> int:
    _set_isa(args.isa)
    cases = case_lines.split(args.case)
    for name in args.cases or ([] if cases else ["smoke"]):
        cases += case_lines.read(name)
    if args.kernel is not None:
        cases = [case for case in cases if any(fnmatch.fnmatchcase(name, args.kernel)
                                               for name in kernels_of(case, args))]
        if not cases:
            raise case_lines.UsageError(f"--kernel {args.kernel}: none of these cases runs in such a kernel; "
                                        "see explain, or add --cases nightly")
    run = runner(args)
    refusals = _refusals(args)
    counts = {"passed": 0, "refused": 0, "failed": 0}
    with terminal.Progress(len(cases), "check") as progress:
        for case in cases:
            outcome, why, canonical = judge(case, run)
            rule = next((rule for rule in refusals if holds(rule, canonical)), None)
            if outcome == "refused" and rule is None:
                outcome, why = "failed", f"refused, and no rule says so: {why}"
            elif outcome == "passed" and rule is not None:
                outcome, why = "failed", f"runs, and must be refused by: {rule}"
            counts[outcome] += 1
            if outcome == "failed":
                progress.print(f"FAIL {_command(case, args)}  # {why}")
            progress.step(case)
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return 1 if counts["failed"] else 0


def kernels_of(case: str, args) -> list[str]:
    """Names of the kernels that the case runs in on the device, in the backend that is forced."""
    from .. import _explain
    device = _lib.Device(kind=_lib.CUDA if args.device == "cuda" else _lib.CPU)
    why = _explain._answer(None, case, device)
    backend = args.backend or why.backend
    names = next((entry["kernel"] for entry in why.answer["backends"] if entry["name"] == backend), None)
    return names.split(", ") if names else []


def judge(text: str, run) -> tuple[str, str, str]:
    """("passed" | "refused" | "failed", why, the case in its canonical spelling)."""
    from . import conformance
    canonical = _plain(text)
    try:
        with conformance.Case(text) as case:
            canonical = case.text
            try:
                run(case)
            except _lib.Refused as error:
                return "refused", _one_line(error), canonical
            verdict = case.compare()
    except (ValueError, RuntimeError, MemoryError, TypeError) as error:
        return "failed", _one_line(error), canonical
    if verdict["passed"]:
        return "passed", "", canonical
    return "failed", _one_line("; ".join(verdict["failures"]) or "no verdict"), canonical


def runner(args):
    """A function that computes a case's outputs into its own arrays."""
    from . import conformance
    if args.through == "c":
        device = _lib.Device(kind=_lib.CUDA if args.device == "cuda" else _lib.CPU)
        return lambda case: case.run(args.backend, device, args.threads or 0)
    if args.through == "numpy":
        if args.device != "cpu":
            raise case_lines.UsageError("--device cuda: NumPy arrays are on the CPU; use "
                                        "--through c or a front end with CUDA arrays")
        if args.threads is not None:
            import tessera
            tessera.set_num_threads(args.threads)
        if importlib.util.find_spec("ml_dtypes") is not None:
            return lambda case: through_numpy(case, args.backend)
        return lambda case: through_numpy(case, args.backend) if conformance.numpy_knows(case) else \
            case.run(args.backend, _lib.CPU_DEVICE, args.threads or 0)
    try:
        module = importlib.import_module(f"tessera.cli.through.{args.through}")
    except ImportError as error:
        raise case_lines.UsageError(f"--through {args.through}: {error}; is tessera's front end for "
                                    f"{args.through} installed?") from error
    return module.runner(args)


def through_numpy(case, backend: str | None):
    """Runs a case by tessera.attention or attention_backward on views of its tensors."""
    import tessera
    arguments = dict(case.arguments(), backend=backend)
    outputs = case.group("outputs")
    case.poison_outputs()
    in_place = case.spec["out"]
    if not case.is_backward:
        results = tessera.attention(**arguments, out=outputs["o"] if in_place else None)
        results = dict(zip(outputs, results if isinstance(results, tuple) else (results,)))
    else:
        names = tuple(case.spec["grads"])
        grads = {name: outputs[name] for name in names} if in_place else names
        gradients = tessera.attention_backward(**arguments, **case.group("backward"), grads=grads)
        results = {name: getattr(gradients, name) for name in outputs}
    for name, result in results.items():
        if result.shape != outputs[name].shape or result.dtype != outputs[name].dtype:
            raise ValueError(f"tessera.check: {name}: {result.dtype}{list(result.shape)} came back, "
                             f"not {outputs[name].dtype}{list(outputs[name].shape)}")
        if result is not outputs[name]:
            outputs[name][...] = result


def _set_isa(isa: str | None):
    """TESSERA_CPU_ISA is read once, when the library starts: start again with it."""
    if isa and os.environ.get("TESSERA_CPU_ISA") != isa:
        os.execve(sys.executable, [sys.executable, "-m", "tessera", *sys.argv[1:]],
                  dict(os.environ, TESSERA_CPU_ISA=isa))


def refusals(backend: str, through: str = "c") -> list[str]:
    """The rules of what a backend refuses, and what a front end does. "cpu" and "cuda" are devices, whose
    rules hold for each of their backends."""
    names = dict.fromkeys((backend.split("_")[0], backend, through))
    places = filter(None, (case_lines.find(f"refused.{name}") for name in names))
    return [rule for place in places for rule in case_lines.read(place)]


def _refusals(args) -> list[str]:
    return case_lines.read(args.refused) if args.refused else refusals(args.backend or args.device, args.through)


def holds(rule: str, case: str) -> bool:
    """Whether each word of a rule, a glob, matches a word of the case; one behind ! must match none."""
    words = case.split()
    return all(glob.startswith("!") != any(fnmatch.fnmatchcase(word, glob.removeprefix("!"))
                                           for word in words) for glob in rule.split())


def _plain(case: str) -> str:
    return " ".join(case.split("#", 1)[0].split())


def _one_line(text) -> str:
    return " ".join(str(text).split())


def _command(case: str, args) -> str:
    words = ["python", "-m", "tessera", "check", shlex.quote(_plain(case)).replace("'", '"')]
    if args.through != "numpy":
        words += ["--through", args.through]
    for name in ("backend", "threads", "isa"):
        if getattr(args, name) is not None:
            words += [f"--{name}", str(getattr(args, name))]
    return " ".join(words + (["--device", args.device] if args.device != "cpu" else []))
