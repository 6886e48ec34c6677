# SPDX-License-Identifier: Apache-2.0
"""examples/doors as the tests of each door run them, and what they print."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "doors"
DEVICE = os.environ.get("TESSERA_TEST_DEVICE", "cpu")


def printed(name: str, capsys) -> str:
    """What an example prints, in this process."""
    capsys.readouterr()
    runpy.run_path(str(FOLDER / f"{name}.py"))["main"](["--device", DEVICE])
    return capsys.readouterr().out


def printed_alone(name: str) -> str:
    """What an example prints, in a process of its own: it loads another tessera, or makes what a process has once."""
    path = os.pathsep.join(filter(None, (str(ROOT / "python"), os.environ.get("PYTHONPATH"))))
    done = subprocess.run([sys.executable, FOLDER / f"{name}.py", "--device", DEVICE], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def calls(text: str) -> list[int]:
    """The calls of tessera that each line counts."""
    return [int(count) for count in re.findall(r"calls of tessera (\d+)", text)]


def rows(text: str, word: str) -> list[str]:
    """What stands between `word` and the next two spaces, or the end, of each line."""
    return re.findall(rf"  {word} (.*?)(?:  |$)", text, re.MULTILINE)


def losses(text: str) -> list[list[float]]:
    return [[float(loss) for loss in row.split()] for row in rows(text, "losses")]


def differences(text: str) -> list[float]:
    return [float(row) for row in re.findall(r"differs? (?:from plain JAX )?by (\S+)", text)]
