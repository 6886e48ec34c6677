# SPDX-License-Identifier: Apache-2.0
"""sass_diff.py BEFORE AFTER: whether two builds hold the same machine code, whatever their kernels are called.

BEFORE and AFTER are object files, shared libraries or folders, searched for *.cu.o. A kernel is its architecture and
the text of its instructions, without names, addresses and encodings: a move, or another name of a type, leaves it as
it is. Prints the kernels that stand on one side alone, with how many instructions they have, and exits with 1 if there
are any; with --subset only those of AFTER, as when a part of a build was made anew. Needs no GPU, and cuobjdump with
nvdisasm: of the CUDA toolkit, or those that come with the Python package triton.
"""

import argparse
import collections
import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

ARCH = re.compile(r"^\s*arch = (\w+)|^\s*code for (\w+)", re.MULTILINE)
FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?;)", re.MULTILINE)
NAME = re.compile(r"`\([^)]*\)|\$?\b_Z\w+|\$__\w+")


def cuobjdump() -> tuple[str, dict[str, str]]:
    """The program, and the environment in which it finds nvdisasm."""
    found = shutil.which("cuobjdump")
    if not found:
        triton = importlib.util.find_spec("triton")
        place = triton and pathlib.Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"
        if not place or not place.exists():
            raise SystemExit("cuobjdump: not found; add it to PATH, or run this where the package triton is installed")
        found = str(place)
    return found, {**os.environ, "PATH": f"{pathlib.Path(found).parent}{os.pathsep}{os.environ['PATH']}"}


def objects(place: pathlib.Path) -> list[pathlib.Path]:
    return sorted(place.rglob("*.cu.o")) if place.is_dir() else [place]


def kernels_of(file: pathlib.Path) -> list[tuple[tuple[str, str, int], str]]:
    """((architecture, hash of its instructions, their number), mangled name) of each kernel."""
    program, environment = cuobjdump()
    done = subprocess.run([program, "-sass", str(file)], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{file}: {done.stderr.strip() or 'cuobjdump failed'}")
    found, arch = [], ""
    pieces = re.split(r"(?=^\s*Function : )", done.stdout, flags=re.MULTILINE)
    for piece in pieces:
        name = FUNCTION.search(piece)
        if name:
            code = [NAME.sub("@", line) for line in INSTRUCTION.findall(piece)]
            digest = hashlib.sha256("\n".join(code).encode()).hexdigest()
            found.append(((arch, digest, len(code)), name[1]))
        for match in ARCH.finditer(piece):  # of the functions after it
            arch = match[1] or match[2]
    return found


def read(places: list[pathlib.Path], jobs: int) -> dict[tuple[str, str, int], list[str]]:
    kernels = collections.defaultdict(list)
    files = [file for place in places for file in objects(place)]
    if not files:
        raise SystemExit(f"{', '.join(map(str, places))}: no *.cu.o")
    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(kernels_of, files):
            for key, name in found:
                kernels[key].append(name)
    return kernels


def demangled(names: list[str]) -> list[str]:
    try:
        done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True)
    except FileNotFoundError:
        return names
    return done.stdout.splitlines() if done.returncode == 0 else names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=pathlib.Path, nargs="+", help="objects, libraries or folders")
    parser.add_argument("after", type=pathlib.Path)
    parser.add_argument("--subset", action="store_true", help="AFTER has but a part of the kernels")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    before, after = read(args.before, args.jobs), read([args.after], args.jobs)
    alone = [("after", key, name) for key in after for name in after[key][len(before.get(key, [])):]]
    if not args.subset:
        alone += [("before", key, name) for key in before for name in before[key][len(after.get(key, [])):]]
    for (side, (arch, _, count), _), name in zip(alone, demangled([name for _, _, name in alone])):
        print(f"only {side}: {arch}, {count} instructions, {name}")
    same = sum(min(len(names), len(before.get(key, []))) for key, names in after.items())
    print(f"{same} kernels are the same, {len(alone)} stand on one side alone")
    return 1 if alone else 0


if __name__ == "__main__":
    sys.exit(main())
