# SPDX-License-Identifier: Apache-2.0
"""Lines of code per folder, and the files, functions and folders over their budget (exit 1): `./dev sizes`.

A file may have 600 lines; one that needs more is named in OVER_BUDGET with its decision record. A function may have
80 lines, and 400 if it is a kernel or one role of a kernel, which is read once from top to bottom. A folder may have
15 files; one that needs more is named in CROWDED, and why.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

from functions import Function, functions

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 600
LINES_OF_FUNCTION, LINES_OF_ROLE = 80, 400
ROLES = {"producer", "consumer", "run", "scores", "gradients", "write_results"}  # in a .cuh
FILES_OF_FOLDER = 15
CODE = {".h", ".cc", ".c", ".cu", ".cuh", ".in", ".py", ".sh"}
FUNCTIONS = CODE - {".in", ".sh"}
OVER_BUDGET: dict[str, str] = {}  # path -> decision record
CROWDED = {  # folder -> why one look need not show it
    "docs": "pages of the site, which others link to by address; mkdocs.yml puts them in order",
    "docs/kernels": "pages of the site",
    "docs/lab": "a page a study, by date: grows and is not rearranged",
}


def lines(path: Path) -> int:
    """Lines that are neither blank nor the licence line."""
    return sum(bool(line.strip()) and "SPDX-License" not in line
               for line in path.read_text().splitlines())


def long_functions(path: Path) -> list[tuple[Function, int]]:
    """Functions of a file that are over their budget, and the budget."""
    found = []
    for function in functions(path):
        is_role = function.is_kernel or (path.suffix == ".cuh" and function.name in ROLES)
        budget = LINES_OF_ROLE if is_role else LINES_OF_FUNCTION
        if function.lines > budget:
            found.append((function, budget))
    return found


def crowded_folders(names) -> list[tuple[str, int]]:
    """Folders with too many files, and how many."""
    files = Counter(Path(name).parent.as_posix() for name in names)
    return [(folder, count) for folder, count in sorted(files.items())
            if count > FILES_OF_FOLDER and folder not in CROWDED]


def main() -> int:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [Path(name) for name in listed.stdout.splitlines() if Path(name).suffix in CODE]
    files = [path for path in files if (ROOT / path).exists()]
    sizes = {path: lines(ROOT / path) for path in files}
    parts: Counter[str] = Counter()
    for path, count in sizes.items():
        parts["/".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0]] += count
    for part, count in sorted(parts.items()):
        print(f"{count:7d}  {part}")
    print(f"{sum(parts.values()):7d}  in all, {len(files)} files")
    over = [path for path, count in sizes.items()
            if count > BUDGET and path.as_posix() not in OVER_BUDGET]
    for path in over:
        print(f"over budget: {path} has {sizes[path]} lines, {BUDGET} are allowed "
              "(split it, or name its decision record in tools/sizes.py)")
    long = [(path, *each) for path in files if path.suffix in FUNCTIONS for each in long_functions(ROOT / path)]
    for path, function, budget in long:
        print(f"over budget: {path}:{function.line}: {function.name}() has {function.lines} lines, {budget} are "
              "allowed (cut it into pieces with names)")
    crowded = crowded_folders(name for name in listed.stdout.splitlines() if (ROOT / name).exists())
    for folder, count in crowded:
        print(f"over budget: {folder}/ has {count} files, {FILES_OF_FOLDER} are allowed (make folders)")
    return 1 if over or long or crowded else 0


if __name__ == "__main__":
    sys.exit(main())
