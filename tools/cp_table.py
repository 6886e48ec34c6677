#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The table of docs/context_parallel.md: what the model of tessera.context_parallel says of 4 to 64 GPUs.

    tools/cp_table.py            prints it
    tools/cp_table.py --check    fails if the document has another
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

from tessera.context_parallel import Shards, plan  # noqa: E402

SIZES = (4, 8, 16, 32, 64)
PROBLEMS = (("16/16", 32768, None), ("16/16", 131072, None), ("32/8", 32768, None),
            ("32/8", 131072, None), ("32/8", 1 << 20, None), ("64/8", 131072, None),
            ("32/8", 131072, (4096, 0)))


def rows():
    yield "| heads, tokens | " + " | ".join(f"{size} GPUs" for size in SIZES) + " |"
    yield "|---|" + "---|" * len(SIZES)
    for heads, length, window in PROBLEMS:
        hq, hk = map(int, heads.split("/"))
        cells = []
        for size in SIZES:
            shards = (Shards.contiguous if window else Shards.zigzag)([length], size)
            chosen = plan(shards, hq=hq, hk=hk, dqk=128, dv=128, causal=True, window=window,
                          inner=8 if size > 8 else 1)
            alone = sum(plan(Shards.zigzag([length], 1), hq=hq, hk=hk, dqk=128, dv=128, causal=True,
                             window=window).compute)
            ratio = (sum(chosen.compute) + sum(chosen.chosen.exposed)) * size / alone
            groups = f" {chosen.groups}" if chosen.groups > 1 else ""
            cells.append(f"{chosen.exchange}{groups}, {ratio:.2f}")
        name = f"{heads}, {length // 1024}k" + (", window 4k" if window else "")
        yield f"| {name} | " + " | ".join(cells) + " |"


def main() -> int:
    table = "\n".join(rows())
    if "--check" not in sys.argv[1:]:
        print(table)
        return 0
    document = ROOT / "docs" / "context_parallel.md"
    if table in document.read_text():
        return 0
    print(f"{document.relative_to(ROOT)}: its table is not what tools/cp_table.py prints; paste that in")
    return 1


if __name__ == "__main__":
    sys.exit(main())
