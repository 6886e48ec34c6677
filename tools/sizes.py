# SPDX-License-Identifier: Apache-2.0
"""Lines of code per room, and the files over their budget (exit 1): `./dev sizes`.

A file may have 600 lines; one that needs more is named in OVER_BUDGET with its decision record.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 600
CODE = {".h", ".cc", ".c", ".cu", ".cuh", ".in", ".py", ".sh"}
OVER_BUDGET: dict[str, str] = {}  # path -> decision record


def lines(path: Path) -> int:
    """Lines that are neither blank nor the licence line."""
    return sum(bool(line.strip()) and "SPDX-License" not in line
               for line in path.read_text().splitlines())


def main() -> int:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [Path(name) for name in listed.stdout.splitlines() if Path(name).suffix in CODE]
    files = [path for path in files if (ROOT / path).exists()]
    sizes = {path: lines(ROOT / path) for path in files}
    rooms: Counter[str] = Counter()
    for path, count in sizes.items():
        rooms["/".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0]] += count
    for room, count in sorted(rooms.items()):
        print(f"{count:7d}  {room}")
    print(f"{sum(rooms.values()):7d}  in all, {len(files)} files")
    over = [path for path, count in sizes.items()
            if count > BUDGET and path.as_posix() not in OVER_BUDGET]
    for path in over:
        print(f"over budget: {path} has {sizes[path]} lines, {BUDGET} are allowed "
              "(split it, or name its decision record in tools/sizes.py)")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
