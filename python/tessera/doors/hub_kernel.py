# SPDX-License-Identifier: Apache-2.0
"""tessera as a kernel of Hugging Face's hub, which transformers loads as attn_implementation="org/repo".

    python -m tessera.doors.hub_kernel PLACE                  from the package that runs
    python -m tessera.doors.hub_kernel PLACE --wheel FILE     from a wheel

writes PLACE/build/torch-universal: the package, its entry and metadata.json. One folder serves every PyTorch that
the binding is for (docs/packaging.md), so there are no variants. Upload PLACE as org/repo, or name it by
LOCAL_KERNELS=org/repo=PLACE.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from .. import __version__, _bindings, _lib

VARIANT = "torch-universal"
KERNEL_VERSION = 1  # of the hub: transformers asks for 1
_PACKAGE = Path(__file__).resolve().parents[1]
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.cc", "CMakeLists.txt", "*.h", "lib", "include")


def pack(place: str | Path, wheel: str | Path | None = None) -> Path:
    """Writes the folder, and returns place/build/torch-universal. place must not have one yet; wheel None is the
    package that runs. ValueError: anything else."""
    target = Path(place) / "build" / VARIANT
    if target.exists():
        raise ValueError(f"tessera.hub_kernel: PLACE={place}: holds build/{VARIANT} already; remove it, or "
                         "name another")
    if wheel is None:
        version = __version__
        target.mkdir(parents=True)
        _copy_package(target / "tessera")
    else:
        version = _unpack(Path(wheel), target)
    shutil.copyfile(_PACKAGE / "doors" / "_hub_entry.py", target / "__init__.py")
    (target / "metadata.json").write_text(json.dumps(_metadata(version), indent=2) + "\n", encoding="utf-8")
    return target


def _metadata(version: str) -> dict:
    return {
        "name": "tessera",
        "id": "_tessera_" + "".join(c if c.isalnum() else "_" for c in version),  # the entry's name as a module
        "version": KERNEL_VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},  # which the kernels for CPUs lie beside
        "tessera-version": version,
    }


def _copy_package(target: Path):
    """The package that runs; in a checkout its libraries lie elsewhere."""
    shutil.copytree(_PACKAGE, target, ignore=_LEFT_OUT)
    for source, folder in ((Path(_lib.lib._name), target), (_bindings._place("torch"), target / "torch")):
        if source is None:
            raise ValueError("tessera.hub_kernel: libtessera_torch.so was not built; install the wheel, or compile "
                             "tessera where PyTorch is installed")
        shutil.copyfile(source, folder / source.name)


def _unpack(wheel: Path, target: Path) -> str:
    """The package in a wheel; its version."""
    name, version, *_ = wheel.name.split("-")
    if not zipfile.is_zipfile(wheel) or name != "tessera_attention":
        raise ValueError(f"tessera.hub_kernel: wheel={wheel}: must be a wheel of tessera-attention")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        members = [member for member in archive.namelist() if member.startswith("tessera/")]
        if "tessera/torch/libtessera_torch.so" not in members:
            raise ValueError(f"tessera.hub_kernel: wheel={wheel}: has no libtessera_torch.so; build it where PyTorch "
                             "is installed")
        archive.extractall(folder, members)
        target.mkdir(parents=True)
        shutil.copytree(Path(folder) / "tessera", target / "tessera", ignore=_LEFT_OUT)
    return version


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tessera.doors.hub_kernel", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", metavar="PLACE")
    parser.add_argument("--wheel", metavar="FILE")
    args = parser.parse_args(argv)
    try:
        print(pack(args.place, args.wheel))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
