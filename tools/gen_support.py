# SPDX-License-Identifier: Apache-2.0
"""Writes the support table of docs/support.md from what explain answers: `./dev python tools/gen_support.py`.

One row a feature, one column for the GPUs whose first choice a backend is; the rules of all of them are in every build.
`--check` fails if the table is out of date, and writes nothing.
"""

import sys
from pathlib import Path

import tessera

PAGE = Path(__file__).resolve().parents[1] / "docs" / "support.md"
BEGIN, END = "<!-- support: written by tools/gen_support.py -->", "<!-- end of support -->"
BACKENDS = {"cpu": "cpu", "cuda_sm80": "sm80", "cuda_sm90": "sm90", "cudnn": "sm100"}  # name -> device to ask about
CARDS = ("CPU: {}", "A100, RTX 30, 40 and 50: {}", "H100, H200, GH200: {}",
         "B200, B300: {}, which only an H200 has run")
FEATURES = {
    "causal, windows, both alignments": "causal",
    "dense boolean mask": "keep=random:0.5/bhqk",
    "key ranges": "ranges=two:1",
    "document segments": "segments=4",
    "bias and its gradient": "bias=post/hqk grads=dbias",
    "ALiBi and its gradient": "causal alibi grads=dalibi_slopes",
    "softcap": "softcap=30",
    "learnable sink and its gradient": "sink=learnable grads=dsink",
    "dropout": "dropout=0.1",
    "windows of sequences": "windows=random:1 align=top_left",
    "positions (q_start, k_start)": "causal align=top_left q_start=64,0 k_start=0,32",
    "positions beside dropout": "q_start=64,0 k_start=0,32 dropout=0.1",
    "GQA": "hk=2",
    "packed (thd) with gaps": "layout=thd lens=random:1 gaps=3",
    "interleaved qkv": "layout=bs3hd",
    "paged K/V": "page=16",
    "head dims 192/128": "dqk=192 dv=128",
    "head dims 576/512": "dqk=576 dv=512",
    "odd head dims": "d=33",
    "fp16": "fp16",
    "fp32": "fp32",
    "fp8 K/V beside bf16 q": "kv=e4m3",
    "fp8 q, k, v, do, results, amax": "e4m3 qscale=row kvscale=block do=e5m2 o=e4m3 grad=e5m2 amax",
    "deterministic backward": "deterministic",
    "fp32 o and gradients beside bf16": "o=fp32 grad=fp32",
    "outputs that are added to (accumulate)": "accumulate",
}


def case_of(pass_: str, tokens: str) -> str:
    words = tokens.split()
    dtype = words.pop(0) if words[0] in ("fp16", "fp32", "e4m3") else "bf16"
    if pass_ == "fwd":
        words = [word for word in words if not word.startswith(("grad=", "grads=", "do=")) and word != "deterministic"]
    sizes = ["b=2", "s=512"]
    sizes += ["hq=8", *(["hk=8"] if "hk=2" not in words else [])]
    if not any(word.startswith(("d=", "dqk=")) for word in words):
        sizes.append("d=128")
    return " ".join([pass_, dtype, *sizes, *words])


def runs(backend: str, case: str) -> str | None:
    """Who runs it on the backend's device, by rules and not by this build or machine: the backend itself wherever it
    can, else another, or nobody."""
    why = tessera.explain(case, device=BACKENDS[backend])
    return why.backend if why.reasons[backend] else backend


def cell(backend: str, tokens: str) -> str:
    """Which passes run, and who runs those that the backend does not: "fwd, bwd by `cuda_sm80`"; a dash for nobody."""
    passes: dict[str | None, list[str]] = {}
    for pass_ in ("fwd", "bwd"):
        passes.setdefault(runs(backend, case_of(pass_, tokens)), []).append(pass_)
    passes.pop(None, None)
    return "; ".join(", ".join(names) + ("" if by == backend else f" by `{by}`") for by, names in passes.items()) or "–"


def table() -> str:
    heads = [card.format(f"`{name}`") for name, card in zip(BACKENDS, CARDS)]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(BACKENDS) + 1) + "|"]
    lines += [f"| {feature} | {' | '.join(cell(name, tokens) for name in BACKENDS)} |"
              for feature, tokens in FEATURES.items()]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    new = f"{head}{BEGIN}\n{table()}\n{END}{tail}"
    if "--check" in argv:
        if new != text:
            print("the support table of docs/support.md is out of date: ./dev python tools/gen_support.py")
        return new != text
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
