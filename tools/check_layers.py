# SPDX-License-Identifier: Apache-2.0
"""Folders include and import downwards only. Prints every include and import that breaks the rule; exit 1 if there is
one.

The rule is docs/conventions.md, "Folders". A folder that is not in the table below may see core alone,
until it states more. The folders of a CUDA backend have a table of their own. python_layers.py has Python's.
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
    "cuda/cudnn": {"core", "cuda/common"},
    "cuda/sm80": {"core", "cuda/common"},
    "cuda/sm90": {"core", "cuda/common"},
    "conformance": {"core"},
    "nvte": {"cuda/common/current_device"},  # over tessera.h, and a header that nothing else lies behind
}
# The same within a CUDA folder, for its own folders, beside what lies directly in it (a backend's plan.h, its rules and
# tables, which see all). A single header of a folder is named with its path.
MAY_INCLUDE_WITHIN = {
    "cuda/common": {
        "cache": set(),
        "few": {"score", "work"},
        "merge": set(),
        "quantise": set(),
        "rules": set(),
        "score": set(),
        "work": set(),
    },
    "cuda/sm80": {
        "machine": set(),
        "convert": set(),
        "products": {"convert"},
        "decode": {"machine"},
        "stream": {"machine"},
        "forward": {"machine", "stream/host"},  # the plan of a forward pass may be one of few rows
        "backward": {"machine"},
    },
    "cuda/sm90": {
        "machine": set(),
        "bias": {"machine"},
        "score": {"machine"},  # what both passes share: it knows neither
        "forward": {"machine", "score"},
        "decode": {"machine"},
        "fp8": {"machine", "score", "forward"},
        "mla": {"machine", "score", "forward"},
        "wide": {"machine", "score", "forward"},
        "backward": {"machine", "score", "forward", "dbias/host"},  # its plan queues dbias
        "dbias": {"machine", "score", "backward"},
    },
}
PUBLIC = {"tessera.h", "tessera_nvte.h"}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def folder_of(path: str) -> str:
    """"cuda/sm90/forward/tile.h" -> "cuda/sm90"; a file directly under src/ belongs to the front door."""
    parts = path.split("/")
    if len(parts) == 1:
        return "door"
    return "/".join(parts[:2]) if parts[0] == "cuda" and len(parts) > 2 else parts[0]


def room_of(path: str, folder: str) -> str:
    """"cuda/sm90/backward/fused/owner.cuh" -> "backward", in cuda/sm90; "" for a file directly in the folder."""
    parts = path.removeprefix(folder + "/").split("/")
    return parts[0] if len(parts) > 1 else ""


def breaks_within(name: str, target: str, folder: str) -> str | None:
    """What an include between two places of one folder breaks."""
    rooms = MAY_INCLUDE_WITHIN.get(folder)
    room, seen = room_of(name, folder), room_of(target, folder)
    if rooms is None or not room or not seen or room == seen:
        return None
    if room not in rooms:
        return f"src/{name}: {folder} has no row for {room} in tools/check_layers.py"
    inside = Path(target).with_suffix("").as_posix().removeprefix(folder + "/")
    if seen in rooms[room] or inside in rooms[room]:
        return None
    return (f'src/{name} includes "{target}": {room} of {folder} may include only '
            f"{', '.join(sorted(rooms[room])) or 'itself'}")


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
            if folder_of(target) == folder and (broken := breaks_within(name, target, folder)):
                found.append(broken)
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
