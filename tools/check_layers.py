# SPDX-License-Identifier: Apache-2.0
"""Folders include and import downwards only. Prints every include and import that breaks the rule; exit 1 if there is
one.

The rule is docs/conventions.md, "Folders". A folder that is not in the table below may see core alone,
until it states more. python_layers.py has Python's.
"""

import re
import sys
from pathlib import Path

import python_layers

SOURCE = Path(__file__).resolve().parents[1] / "src"

# folder -> the folders whose headers it may include, beside its own and <...> headers. The front door
# may include them all.
MAY_INCLUDE = {
    "core": set(),
    "cpu": {"core"},
    "cuda/common": {"core"},
    "cuda/sm80": {"core", "cuda/common"},
    "cuda/sm90": {"core", "cuda/common"},
    "conformance": {"core"},
    "nvte": {"cuda/common/current_device"},  # over tessera.h, and a header that nothing else lies behind
}
PUBLIC = {"tessera.h", "tessera_nvte.h"}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def folder_of(path: str) -> str:
    """"cuda/sm90/forward/tile.h" -> "cuda/sm90"; a file directly under src/ belongs to the front door."""
    parts = path.split("/")
    if len(parts) == 1:
        return "door"
    return "/".join(parts[:2]) if parts[0] == "cuda" and len(parts) > 2 else parts[0]


def violations() -> list[str]:
    found = []
    for file in sorted(SOURCE.rglob("*")):
        if file.suffix not in {".h", ".cc", ".cu", ".cuh", ".in"}:
            continue
        name = file.relative_to(SOURCE).as_posix()
        folder = folder_of(name)
        if folder == "door":
            continue
        for target in INCLUDE.findall(file.read_text()):
            if target in PUBLIC or folder_of(target) == folder:
                continue
            allowed = MAY_INCLUDE.get(folder, {"core"})
            if folder_of(target) not in allowed and Path(target).with_suffix("").as_posix() not in allowed:
                found.append(f'src/{name} includes "{target}": {folder} may include only '
                             f"{', '.join(sorted(allowed)) or 'itself'}")
    return found


def main() -> int:
    found = violations() + python_layers.violations()
    print("\n".join(found) if found else "layers are in order")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
