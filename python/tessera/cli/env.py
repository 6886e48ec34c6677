# SPDX-License-Identifier: Apache-2.0
"""python -m tessera env: versions, CPU, GPUs and backends. Put it into a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

from .._machine import cpu_model
from . import case_lines, terminal

_PACKAGES = ("tessera-attention", "numpy", "ml_dtypes", "torch", "jax", "paddlepaddle",
             "paddlepaddle-gpu", "rich", "matplotlib")
_VARIABLES = ("TESSERA_BACKEND", "TESSERA_LOG", "TESSERA_NUM_THREADS", "TESSERA_CPU_ISA", "TESSERA_TE_ORDER")

EPILOG = """\
examples:
  python -m tessera env --json > report.json
  cmake -DCMAKE_PREFIX_PATH=$(python -m tessera env --prefix) ...
  PKG_CONFIG_PATH=$(python -m tessera env --prefix)/lib/pkgconfig pkg-config --cflags --libs tessera"""


def add_parser(commands):
    parser = commands.add_parser("env", help="show versions, CPU, GPUs and backends, for bug reports",
                                 description=__doc__, epilog=EPILOG,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of a table")
    form.add_argument("--prefix", action="store_true", help="print only the folder in which CMake and pkg-config "
                      "find the C library of this package")
    parser.set_defaults(main=main)


def main(args) -> int:
    if args.prefix:
        print(prefix())
        return 0
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    rows = [[name, _text(value)] for name, value in _flat(facts)]
    terminal.print_table(["<what", "<value"], rows)
    return 0


def collect() -> dict:
    import tessera
    from tessera import _bindings, _lib, doors
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "tessera": tessera.__version__,
        "library": _lib.lib._name,
        "build": _lib.description(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cpus": {"of the machine": os.cpu_count(), "of this process": len(os.sched_getaffinity(0))},
        "gpus": gpus(),
        "binding": _bindings.states(),
        "doors": doors.states(),
        "packages": packages,
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def prefix() -> Path:
    """The folder of an installed package; a checkout has none before `cmake --install`."""
    package = Path(__file__).resolve().parents[1]
    if not (package / "lib" / "cmake").is_dir():
        raise case_lines.UsageError("tessera.env: --prefix: this is a source checkout, which has none; install "
                                    "the wheel, or `cmake --install build/cpu --prefix PLACE`")
    return package


def gpus() -> list[dict]:
    """What nvidia-smi says; empty without it."""
    fields = ("name", "compute_cap", "memory.total", "driver_version")
    if not shutil.which("nvidia-smi"):
        return []
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(fields)}",
                               "--format=csv,noheader"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    return [dict(zip(fields, (cell.strip() for cell in line.split(","))))
            for line in done.stdout.splitlines() if line.strip()]


def _flat(value, prefix=""):
    """(dotted name, leaf) pairs of nested dicts; lists of dicts are numbered."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {item.get("name", str(i)): {k: v for k, v in item.items() if k != "name"}
                 for i, item in enumerate(value)}
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _flat(item, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, value


_MOST_ITEMS = 16  # of a list in a line


def _text(value) -> str:
    if isinstance(value, (list, dict)) and not value:
        return "none"
    if isinstance(value, list) and len(value) > _MOST_ITEMS:
        return f"{len(value)}, from {value[0]} to {value[-1]} (--json lists them)"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "-" if value is None else str(value)
