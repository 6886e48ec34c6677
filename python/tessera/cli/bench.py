# SPDX-License-Identifier: Apache-2.0
"""python -m tessera bench: time cases, and other libraries by turns in the same process."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import itertools
import json
import shlex
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import bench_devices, case_lines, decode_grid, peers, plot, sweep, terminal, timing, work

_BYTE_SHARE = {1: 0.9}  # of reading's speed, by bytes of a key's element: fp8 is converted besides
_OTHER_BYTE_SHARE = 0.95
_FEW_OPERATIONS = 32  # for each byte: below, memory may be the limit
_SUITES = Path(__file__).resolve().parents[1] / "bench_suites"
_SWEEP = "sweep"  # a suite that is drawn

EPILOG = """\
examples:
  python -m tessera bench "fwd bf16 b=1 s=2048 h=8 d=128 causal" --against torch,numpy
  python -m tessera bench --suite cpu --against torch --json cpu.json --plot cpu.png
  python -m tessera bench --suite scaling --threads 1 --json one.json
  python -m tessera bench --from one.json,two.json --plot scaling.png --plot-as scaling
  python -m tessera bench --suite hopper --device cuda --against cudnn,flex
  python -m tessera bench --grid goals --device cuda --against flashinfer,cudnn,flash --quick \\
      --json decode.json --plot decode.png --plot-as bytes
  python -m tessera bench --suite sweep --device cuda --against cudnn,flash-attn-2,efficient --quick \\
      --seconds 100 --json sweep.json --resume --plot sweep.png
columns:
  ms, min   median and least time of a call
  x torch   how many times as long torch takes, by the median over neighbouring samples
  % peak    share of the fastest multiply-add loop of this machine, of the dtype's native width; on a
            GPU share of a matrix product of 8192. Measured between the samples
  % DRAM    share of the speed at which memory can be read, for cases that do little with each byte,
            as decode does. Measured between the samples
  rule ms   5 us + bytes / (0.95 x the speed of a sum over 1 GiB in the same run; 0.9 x for an fp8
            cache). k of an MLA cache holds v, and counts once
  rule      pass if tessera's time is at most that
The sweep has random shapes of real models. After its rows come the worst ten, by the time of the
fastest peer over tessera's, and a summary: geometric mean of these ratios, and the share below 1.
On a GPU each contender is a CUDA graph of many calls. Where memory may be the limit, these calls use
copies of the tensors by turns, so that no cache holds them.
peers of --against:
  torch     scaled_dot_product_attention
  flex      compiled FlexAttention
  matmul    PyTorch's matrix products and softmax, in bf16 those of oneDNN
  numpy     unfused
  paddle    its scaled_dot_product_attention, on the CPU in fp32
  cudnn, flash-attn-2, efficient    PyTorch's own, on a GPU
  flash-attn-4                      on a GPU, if it is installed
  flashinfer                        decode on a GPU, if installed: its paged and MLA wrappers; plain
                                    caches as pages of 64; v_scale, a kernel of its own there, is left out
  flash                             decode on a GPU, if installed: flash_attn_with_kvcache of
                                    FlashAttention-3, else 2
  build:PATH                        another build: PATH is its libtessera.so. Shows what a change gains
  fa3:PATH                          PATH is FlashAttention-3 as a library of PyTorch operators"""


def add_parser(commands):
    suites = sorted(path.stem for path in _SUITES.glob("*.cases"))
    parser = commands.add_parser("bench", help="time cases, and other libraries beside them",
                                 description=__doc__, epilog=EPILOG,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help="a case line")
    parser.add_argument("--suite", choices=sorted([*suites, _SWEEP]),
                        help="a list of cases that comes with tessera; sweep: random shapes of real models, those of "
                             "--seed")
    parser.add_argument("--shapes", type=int, default=300, metavar="N",
                        help="how many shapes a sweep has (default: 300)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which shapes a sweep has (default: 0)")
    parser.add_argument("--grid", choices=decode_grid.GRIDS,
                        help="a grid of decode problems, drawn on the GPU: goals has the 288 of the project's goals")
    parser.add_argument("--cases", metavar="FILE", help="your own list of cases")
    parser.add_argument("--against", default="", metavar="NAME,...", help="peers to time too")
    parser.add_argument("--backend", help="force a backend by name")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="how many threads tessera and torch use")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_const", dest="mode", const="quick",
                      help="take only five samples of each")
    mode.add_argument("--sustained", action="store_const", dest="mode", const="sustained",
                      help="take samples until the clock has settled")
    mode.add_argument("--burst", action="store_const", dest="mode", const="burst",
                      help="pause before each sample")
    parser.set_defaults(mode="normal")
    parser.add_argument("--seconds", type=float, metavar="N", help="measure as many cases as fit into this time")
    parser.add_argument("--json", metavar="FILE", help="write all results, after each case ('-': to stdout)")
    parser.add_argument("--resume", action="store_true", help="measure what the file of --json does not have yet")
    parser.add_argument("--from", dest="saved", metavar="FILE,...",
                        help="read results of earlier --json files instead of measuring")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the results (needs matplotlib)")
    parser.add_argument("--plot-as", choices=["bars", "roofline", "ratio", "scaling", "bytes", "sweep"],
                        help="bars: speed of each case; roofline: speed over operations per byte; ratio: time of peers "
                             "over tessera's; scaling: speed over length, by threads; bytes: time over bytes, beside "
                             "the time to read them; sweep: time of the best peer over tessera's, over FLOP "
                             "(default: bars; of a sweep, sweep)")
    parser.set_defaults(main=main)


def main(args) -> int:
    import tessera
    cases, described = _cases(args)
    against = [name for name in args.against.split(",") if name]
    for name in against:
        if name not in peers.PEERS and not name.startswith((peers.BUILD, peers.FA3)):
            raise case_lines.UsageError(
                f"--against {name}: must be one of {', '.join(peers.PEERS)}, {peers.BUILD}PATH or "
                f"{peers.FA3}PATH")
    if args.plot:
        plot.require_matplotlib()
    if args.threads is not None:
        tessera.set_num_threads(args.threads)
    if args.saved:
        results, against = read_results(args.saved)
        if args.json != "-":
            show_row = _printer([entry["case"] for entry in results], against)
            for entry in results:
                show_row(entry)
        return _save(results, against, args, len(results))
    kept = _kept(args, cases, against) if args.resume else []
    have = {entry["case"] for entry in kept}
    left = [case for case in cases if case not in have]
    results, stopped_by = _measured(left, described, kept, against, args) if left else (kept, None)
    status = _save(results, against, args, len(cases))
    if stopped_by is not None or args.seconds and len(results) < len(cases):
        why = f"--seconds {args.seconds:g}" if stopped_by is None else "stopped"
        print(f"{why}: {len(results)} of {len(cases)} cases measured", file=sys.stderr)
    return status if stopped_by is None else 128 + stopped_by


def _cases(args) -> tuple[list[str], dict[str, dict]]:
    """The lines to measure, and what is known of them beside."""
    cases = case_lines.split(args.case)
    described = {}
    if args.suite == _SWEEP:
        if args.shapes < 1:
            raise case_lines.UsageError(f"--shapes {args.shapes}: must be at least 1")
        shapes = sweep.shapes(args.shapes, args.seed, args.device)
        described = {shape.case: {"model": shape.model, "family": shape.family} for shape in shapes}
        cases += described
    elif args.suite:
        cases += case_lines.read(_SUITES / f"{args.suite}.cases")
    if args.cases:
        cases += case_lines.read(args.cases)
    grid = decode_grid.GRIDS[args.grid]() if args.grid else []
    if grid and cases:
        raise case_lines.UsageError("bench: --grid is a list of its own, so give no cases and no --suite")
    cases = cases or grid
    if args.saved and cases:
        raise case_lines.UsageError("bench: --from takes the results of a file, so give no cases")
    if not cases and not args.saved:
        raise case_lines.UsageError("bench: give a case, --suite, --grid or --cases; see bench --help")
    return cases, described


def _kept(args, cases, against) -> list[dict]:
    """Results of the file of --json for these cases and peers; none if it is not there yet."""
    if args.json in (None, "-"):
        raise case_lines.UsageError("--resume goes on with the file of --json, so give one")
    if not Path(args.json).exists():
        return []
    asked = set(cases)
    return [entry for entry in _saved(args.json, "--resume") if entry["case"] in asked and
            ("error" in entry or set(against) <= set(entry.get("peers", {})))]


def _measured(cases, described, results, against, args) -> tuple[list[dict], int | None]:
    """The results and those of the cases, as many as fit into the time, and the signal that ended it."""
    device = bench_devices.Cuda() if args.device == "cuda" else bench_devices.Cpu(args.threads)
    results, origin, began = list(results), _origin(device), time.monotonic()
    with terminal.Progress(len(cases), "bench") as progress:
        show_row = (lambda _: None) if args.json == "-" else _printer(cases, against, progress.print)
        try:
            with _stopped_by_signals():
                open_case = decode_grid.Drawn if args.grid else _open
                opened_cases = _opened(cases, 0 if args.grid else device.cases_ahead, open_case)
                for done, (case, opened) in enumerate(opened_cases):
                    if done and args.seconds and (time.monotonic() - began) * (done + 1) / done > args.seconds:
                        opened_cases.close()
                        break
                    entry = {**measure(case, opened, against, device, args), **described.get(case, {}), **origin}
                    results.append(sweep.compared(entry) if case in described else entry)
                    _write(results, args.json, False)
                    show_row(results[-1])
                    progress.step(case)
        except _Stopped as stop:
            return results, stop.args[0]
    return results, None


def _origin(device) -> dict:
    """Where, when, what and how: of every entry, so that a picture of it can say so."""
    import tessera
    return {"machine": device.machine, "version": tessera.__version__, "date": datetime.date.today().isoformat(),
            "command": shlex.join(["python", "-m", "tessera", *sys.argv[1:]])}


def read_results(paths: str) -> tuple[list[dict], list[str]]:
    """The results in files of `bench --json`, separated by commas, and the peers that they name."""
    results = [entry for path in paths.split(",") for entry in _saved(path, "--from")]
    return results, sorted({name for entry in results for name in entry.get("peers", {})})


def _saved(path: str, option: str) -> list[dict]:
    try:
        results = json.loads(Path(path).read_text())
        if not all("case" in result and ("error" in result or "tflops" in result)
                   for result in results):
            raise ValueError("no list of bench results")
    except (OSError, ValueError, TypeError) as error:
        raise case_lines.UsageError(f"{option} {path}: {error}; give a file that bench --json wrote"
                                    ) from error
    return results


class _Stopped(BaseException):
    """By the signal of that number. Not an Exception: a peer that fails must not look like it."""


@contextlib.contextmanager
def _stopped_by_signals():
    """Ctrl-C and SIGTERM end the measuring, and what was measured is kept."""
    def stop(number, _):
        raise _Stopped(number)
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _save(results, against, args, asked: int) -> int:
    is_sweep = sweep.is_sweep(results)
    if args.json == "-":
        print(to_json(results))
    elif is_sweep:
        sweep.report(results, asked)
    _write(results, args.json, True)
    if args.plot and results:
        plot.draw(args.plot_as or ("sweep" if is_sweep else "bars"), results, against, args.plot)
    return 1 if all("error" in result for result in results) else 0


def _write(results, path: str | None, ended: bool):
    """All results, in place of the file: whatever ends the process, the file is whole."""
    if path in (None, "-"):
        return
    file = Path(path).resolve()
    if file.exists() and not file.is_file():  # a device or a pipe, which nothing may replace
        if ended:
            file.write_text(to_json(results) + "\n")
        return
    part = file.with_name(f"{file.name}.part")
    part.write_text(to_json(results) + "\n")
    part.replace(file)


def _opened(cases, ahead: int, open_case):
    """(line, its case or the error that it is), the data of the next `ahead` being drawn meanwhile."""
    if not ahead:
        yield from ((line, open_case(line)) for line in cases)
        return
    with ThreadPoolExecutor(ahead) as pool:
        waiting = collections.deque()
        try:
            for line in cases:
                waiting.append((line, pool.submit(open_case, line)))
                if len(waiting) > ahead:
                    line, future = waiting.popleft()
                    yield line, future.result()
            while waiting:
                line, future = waiting.popleft()
                yield line, future.result()
        finally:
            for _, future in waiting:  # whoever takes no more does not wait for them
                future.cancel()


def _open(line: str):
    from . import conformance
    words = line.split()
    if words[:1] == ["bwd"]:  # opening it would compute its reference; its forward half would not
        words = ["fwd"] + [word for word in words[1:] if not word.startswith(("grads=", "dlse"))]
    try:
        return conformance.Case(" ".join(words), as_bits=True)
    except (ValueError, MemoryError) as error:
        return error


def measure(case: str, opened, against, device, args) -> dict:
    """One entry of the JSON list; "error" instead of numbers for a case that does not run."""
    import tessera
    tokens = case.split()
    backward = tokens[:1] == ["bwd"]
    result = {"case": case, "pass": "bwd" if backward else "fwd"}
    try:
        if isinstance(opened, Exception):
            raise opened
        why = tessera.explain(case, device=device.explained_as)
        with opened:
            arguments = opened.arguments()
            copies = 1 if backward else _copies(arguments, device)
            drawn = None
            if isinstance(opened, decode_grid.Drawn):
                sets, outputs, calls = zip(*(device.drawn(opened, args.backend) for _ in range(copies)))
                drawn, o, do = itertools.cycle(sets), outputs[0], None
            else:
                outputs, dos, calls = zip(*(device.problem(dict(arguments, backend=args.backend), tokens, backward)
                                            for _ in range(copies)))
                o, do = outputs[0], dos[0]
            ours = bench_devices.in_turn(calls)
            q, k, v = (arguments.pop(name) for name in "qkv")
            workload = peers.Workload(q, k, v, do, arguments, args.threads, device.name, args.backend,
                                      bench_devices.gradients(tokens), "dlse" in tokens, drawn)
            result.update(backend=args.backend or why.backend, kernel=_kernel(why, args.backend), copies=copies)
            return _timed(result, workload, o, ours, against, device, args)
    except (ValueError, tessera.Refused, MemoryError) as error:
        return dict(result, error=str(error))


def _copies(arguments, device) -> int:
    """How many sets of tensors calls take by turns, where memory may be the limit: so many that none
    is still in a cache when its turn comes."""
    q, k, v, keywords = (arguments["q"], arguments["k"], arguments["v"],
                         {name: value for name, value in arguments.items() if name not in "qkv"})
    read = work.bytes_touched(work.read_once(q, k, v))
    flops = work.flops(work.visible_scores(q, k, v, keywords), q.shape[-1], v.shape[-1], False)
    return device.copies(read) if 0 < flops < _FEW_OPERATIONS * read else 1


def _kernel(why, forced: str | None) -> str | None:
    """Names of the kernels of the backend that is timed."""
    return next((entry["kernel"] for entry in why.answer["backends"]
                 if entry["name"] == (forced or why.backend)), None)


def _timed(result, workload, o, ours, against, device, args) -> dict:
    contenders, refused = {"tessera": device.contender(ours)}, {}
    for name in against:
        try:
            contenders[name] = device.contender(bench_devices.in_turn(
                [peers.prepare(name, workload) for _ in range(result["copies"])]))
        except peers.Unsupported as reason:
            refused[name] = str(reason)
        except RuntimeError as error:  # a peer that fails must not cost the other figures
            refused[name] = f"{name} failed: {peers.first_line(error)}"
    q, k, v, keywords = workload.q, workload.k, workload.v, workload.keywords
    probe = device.peak(q.dtype)
    scores = work.visible_scores(q, k, v, keywords)
    flops = work.flops(scores, q.shape[-1], v.shape[-1], workload.backward)
    touched = work.read_once(q, k, v) + [keywords.get("bias")] + ([q, k, v] if workload.backward else [])
    bytes_touched = work.bytes_touched(touched) + (1 + workload.backward) * o.nbytes
    reads = workload.drawn is not None or flops < _FEW_OPERATIONS * bytes_touched
    memory = device.bandwidth() if reads else None
    probes = {"(peak)": probe.run, **({"(memory)": memory.run} if memory else {})}
    samples = timing.alternate({**contenders, **probes}, timing.MODES[args.mode])

    def numbers(name):
        calls = getattr(contenders[name], "calls", 1)
        seconds = samples[name].median / calls
        return {"ms": seconds * 1e3, "tflops": flops / seconds / 1e12,
                "min_ms": samples[name].best / calls * 1e3,
                "times": samples["tessera"].times(samples[name]) *
                          getattr(contenders["tessera"], "calls", 1) / calls}

    mine = numbers("tessera")
    del mine["times"]
    rate = bytes_touched / (mine["ms"] / 1e3)
    share = _BYTE_SHARE.get(k.dtype.itemsize, _OTHER_BYTE_SHARE)
    rule = device.byte_rule(bytes_touched, memory.bytes_per_s, share) if memory else None
    return {**result, "device": device.name, "threads": args.threads, "flop": flops, **mine,
            "percent_of_peak": 100 * mine["tflops"] / probe.tflops, "bytes_per_s": rate,
            "percent_of_bandwidth": 100 * rate / memory.bytes_per_s if memory else None,
            "byte_rule_ms": rule and rule * 1e3,
            "within_byte_rule": rule and mine["ms"] <= rule * 1e3,
            "peers": {name: {"refused": refused[name]} if name in refused else numbers(name)
                      for name in against}}


def to_json(results) -> str:
    return json.dumps(results, indent=2)


def _printer(cases, against, *print_line):
    """A function that prints the row of a result, with whatever it or its peers refused below."""
    columns = ["<case", ">ms", ">min", ">TFLOP/s", ">% peak", ">GB/s", ">% DRAM", ">rule ms", ">rule"]
    columns += [f">{name} ms" for name in against] + [f">x {name}" for name in against]
    rows = terminal.Rows(columns, max(map(len, cases)), *print_line)

    def show(result):
        refused = [f"    {name}: {peer['refused']}" for name, peer in result.get("peers", {}).items()
                   if "refused" in peer]
        if "error" in result:
            rows.row([result["case"]] + ["-"] * (len(columns) - 1), f"    {result['error']}")
            return
        def of(key, digits, factor=1.0):  # a file may hold a page's figures, which are fewer
            return f"{result[key] * factor:.{digits}f}" if result.get(key) else "-"

        row = [result["case"], of("ms", 3), of("min_ms", 3), of("tflops", 3), of("percent_of_peak", 1),
               of("bytes_per_s", 1, 1e-9), of("percent_of_bandwidth", 1), of("byte_rule_ms", 3),
               {True: "pass", False: "fail"}.get(result.get("within_byte_rule"), "-")]
        peers_of = [result["peers"].get(name, {}) for name in against]
        row += [f"{peer['ms']:.3f}" if "ms" in peer else "-" for peer in peers_of]
        row += [f"{peer['times']:.2f}" if "ms" in peer else "-" for peer in peers_of]
        rows.row(row, *refused)
    return show
