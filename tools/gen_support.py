# SPDX-License-Identifier: Apache-2.0
"""Writes the support table of README.md from what explain answers: `./dev python tools/gen_support.py`.

One row a feature, one column a backend of this build; `--check` fails if a column that this build can
answer for is out of date, and writes nothing. Columns of backends that this build lacks are kept.
"""

import sys
from pathlib import Path

import tessera

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- support: written by tools/gen_support.py -->", "<!-- end of support -->"
BACKENDS = {"cpu": "cpu", "cuda_sm80": "sm80", "cuda_sm90": "sm90"}  # name -> device to ask about
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
    "deterministic backward": "deterministic",
}


def case_of(pass_: str, tokens: str) -> str:
    words = tokens.split()
    dtype = words.pop(0) if words[0] in ("fp16", "fp32") else "bf16"
    if pass_ == "fwd":
        words = [word for word in words if not word.startswith("grads=") and word != "deterministic"]
    sizes = ["b=2", "s=512"]
    sizes += ["hq=8", *(["hk=8"] if "hk=2" not in words else [])]
    if not any(word.startswith(("d=", "dqk=")) for word in words):
        sizes.append("d=128")
    return " ".join([pass_, dtype, *sizes, *words])


def cell(backend: str, tokens: str) -> str:
    """Which passes run: "fwd, bwd", "fwd", or a dash."""
    runs = [pass_ for pass_ in ("fwd", "bwd")
            if not tessera.explain(case_of(pass_, tokens), device=BACKENDS[backend]).reasons[backend]]
    return ", ".join(runs) or "–"


def table(old: dict[str, list[str]]) -> str:
    columns = {}
    for name, device in BACKENDS.items():
        if tessera.explain("fwd bf16 b=1 s=512 h=1 d=64", device=device).reasons.get(name) == []:
            columns[name] = [cell(name, tokens) for tokens in FEATURES.values()]
        elif name in old:
            columns[name] = old[name]
    lines = [f"| | {' | '.join(f'`{name}`' for name in columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {feature} | {' | '.join(cells)} |"
              for feature, *cells in zip(FEATURES, *columns.values())]
    return "\n".join(lines)


def columns_in(text: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()]
    if len(rows) != len(FEATURES) + 2:
        return {}
    return {name.strip("`"): [row[i] for row in rows[2:]]
            for i, name in enumerate(rows[0]) if name.strip()}


def main(argv: list[str]) -> int:
    text = README.read_text()
    head, rest = text.split(BEGIN)
    old, tail = rest.split(END)
    new = f"{head}{BEGIN}\n{table(columns_in(old))}\n{END}{tail}"
    if "--check" in argv:
        if new != text:
            print("the support table of README.md is out of date: ./dev python tools/gen_support.py")
        return new != text
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
