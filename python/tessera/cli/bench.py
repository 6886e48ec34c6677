# SPDX-License-Identifier: Apache-2.0
"""python -m tessera bench: time cases, beside other libraries in the same process, alternating."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from . import case_lines, terminal, timing, work

_SUITES = Path(__file__).resolve().parents[1] / "bench_suites"

EPILOG = """\
examples:
  python -m tessera bench "fwd bf16 b=1 s=2048 h=8 d=128 causal" --against torch,numpy
  python -m tessera bench --suite cpu --against torch --json cpu.json --plot cpu.png
Times are medians per call. % of peak is of the fastest multiply-add loop of this machine (of the
dtype's native width), measured between the samples; for decode look at the bytes per second.
peers: torch (scaled_dot_product_attention), flex (compiled FlexAttention), numpy (unfused)."""


def add_parser(commands):
    suites = sorted(path.stem for path in _SUITES.glob("*.cases"))
    parser = commands.add_parser("bench", help="time cases beside other libraries",
                                 description=__doc__, epilog=EPILOG,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help="a case line")
    parser.add_argument("--suite", choices=suites, help="a list of cases that comes with tessera")
    parser.add_argument("--cases", metavar="FILE", help="a list of cases of yours")
    parser.add_argument("--against", default="", metavar="NAME,...", help="peers to time as well")
    parser.add_argument("--backend", help="force a backend by name")
    parser.add_argument("--threads", type=int, metavar="N", help="of tessera and of torch")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--sustained", action="store_const", dest="mode", const="sustained",
                      default="normal", help="longer, until the clock has settled")
    mode.add_argument("--burst", action="store_const", dest="mode", const="burst",
                      help="a pause before each sample")
    parser.add_argument("--json", metavar="FILE", help="write all results ('-': to stdout)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the results (needs matplotlib)")
    parser.set_defaults(main=main)


def main(args) -> int:
    import tessera
    from . import peers
    cases = case_lines.split(args.case)
    if args.suite:
        cases += case_lines.read(_SUITES / f"{args.suite}.cases")
    if args.cases:
        cases += case_lines.read(args.cases)
    if not cases:
        raise case_lines.UsageError("bench: give a case, --suite or --cases; see bench --help")
    against = [name for name in args.against.split(",") if name]
    for name in against:
        if name not in peers.PEERS:
            raise case_lines.UsageError(f"--against {name}: must be one of "
                                        f"{', '.join(peers.PEERS)}")
    if args.plot:
        from . import plot
        plot.require_matplotlib()
    if args.threads is not None:
        tessera.set_num_threads(args.threads)
    results = []
    with terminal.Progress(len(cases), "bench") as progress:
        for case in cases:
            results.append(measure(case, against, args))
            progress.step(case)
    if args.json == "-":
        print(json.dumps(results, indent=2))
    else:
        show(results, against)
    if args.json and args.json != "-":
        Path(args.json).write_text(json.dumps(results, indent=2))
    if args.plot:
        plot.draw(results, against, args.plot)
    return 1 if all("error" in result for result in results) else 0


def measure(case: str, against, args) -> dict:
    """One entry of the JSON list; "error" instead of numbers for a case that does not run."""
    import tessera
    from . import conformance, peers
    with conformance.Case(case, args.backend) as opened:
        (q, k, v), kw = opened.arguments()
        backward = opened.is_backward
        tensors = {name: opened.array(name) for name in ("do", "o", "lse", "dlse")}
        if backward:
            names = tuple(name for name in ("dq", "dk", "dv", "dbias", "dsink", "dalibi_slopes")
                          if opened.array(name) is not None)
            # o and lse of this very call, so that kernels see what they see in training
            o, lse = tessera.attention(q, k, v, **kw, return_lse=True)
            def ours():
                return tessera.attention_backward(tensors["do"], q, k, v, o, lse, tensors["dlse"],
                                                  names, **kw)
        else:
            returns = {"return_lse": tensors["lse"] is not None,
                       "return_max_logit": opened.array("max_logit") is not None}
            def ours():
                return tessera.attention(q, k, v, **kw, **returns)
        result = {"case": opened.text, "pass": "bwd" if backward else "fwd"}
        try:
            why = tessera.explain(opened.text)
            ours()
        except (ValueError, tessera.Refused, MemoryError) as error:
            return dict(result, error=str(error))
        contenders = {"tessera": ours}
        refused = {}
        workload = peers.Workload(q, k, v, tensors["do"] if backward else None, kw, args.threads)
        for name in against:
            try:
                contenders[name] = peers.prepare(name, workload)
            except peers.Unsupported as reason:
                refused[name] = str(reason)
        probe = conformance.PeakProbe(q.dtype.name, args.threads or 0)
        contenders["(peak)"] = probe.run
        samples = timing.alternate(contenders, timing.MODES[args.mode])
        dqk, dv = q.shape[-1], v.shape[-1]
        flops = work.flops(work.visible_scores(q, k, v, kw), dqk, dv, backward)
        arrays = [q, k, v, kw.get("bias")] + ([tensors["do"], o, q, k, v] if backward else [q])
        seconds = samples["tessera"].median
        tflops = flops / seconds / 1e12
        result.update(
            backend=args.backend or why.backend, device="cpu", ms=seconds * 1e3,
            tflops=tflops, percent_of_peak=100 * tflops / probe.tflops,
            bytes_per_s=work.bytes_touched(arrays) / seconds, min_ms=samples["tessera"].best * 1e3,
            peak_tflops=probe.tflops, peers={})
        for name in against:
            if name in refused:
                result["peers"][name] = {"refused": refused[name]}
            else:
                median = samples[name].median
                result["peers"][name] = {"ms": median * 1e3, "tflops": flops / median / 1e12,
                                         "min_ms": samples[name].best * 1e3}
        return result


def show(results, against):
    columns = ["<case", ">ms", ">min", ">TFLOP/s", ">% peak", ">GB/s"]
    columns += [f">{name} ms" for name in against] + [f">x {name}" for name in against]
    rows = []
    for result in results:
        if "error" in result:
            rows.append([result["case"], "-", "-", "-", "-", "-"] + ["-"] * 2 * len(against))
            continue
        row = [result["case"], f"{result['ms']:.3f}", f"{result['min_ms']:.3f}",
               f"{result['tflops']:.3f}", f"{result['percent_of_peak']:.1f}",
               f"{result['bytes_per_s'] / 1e9:.1f}"]
        peers = [result["peers"][name] for name in against]
        row += [f"{peer['ms']:.3f}" if "ms" in peer else "-" for peer in peers]
        row += [f"{peer['ms'] / result['ms']:.2f}" if "ms" in peer else "-" for peer in peers]
        rows.append(row)
    terminal.print_table(columns, rows)
    for result in results:
        if "error" in result:
            print(f"{result['case']}: {result['error']}")
        for name, peer in result.get("peers", {}).items():
            if "refused" in peer:
                print(f"{result['case']}: {name}: {peer['refused']}")


