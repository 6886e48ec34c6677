#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The list of docs/releasing.md, with what can be found out by looking: exit status 1 while an item is open."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Where each wheel of a release lies, and the option of `./dev wheel` that makes it.
WHEELS = {"build/dist": "", "build/dist/cpu": " --cpu", "build/dist/aarch64": " --platform aarch64"}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def open_items(version: str, changelog: str, citation: str, project: str, status: str, tags: list[str],
               wheels: list[str]) -> list[str]:
    """What is still to be done, a sentence each."""
    items = []
    section = re.search(rf"^## {re.escape(version)}, (.+)$", changelog, re.MULTILINE)
    if not section:
        items.append(f"CHANGELOG.md: needs a section `## {version}, YYYY-MM-DD`")
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", section[1]):
        items.append(f"CHANGELOG.md: {version} is {section[1]!r}: must be a date")
    cited = re.search(r"^version: (.+)$", citation, re.MULTILINE)
    if not cited or cited[1] != version:
        items.append(f"CITATION.cff: version {cited and cited[1]}: must be {version}")
    if not re.search(r"^\[project\.urls\]$", project, re.MULTILINE):
        items.append("pyproject.toml: has no [project.urls]; the package page shows no links without an address")
    elif not re.search(r"^repository-code: https://", citation, re.MULTILINE):
        items.append("CITATION.cff: needs repository-code: and the address that pyproject.toml has")
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        items.append(f"CMakeLists.txt: version {version}: must be MAJOR.MINOR.PATCH")
    if status:
        items.append(f"the tree is not clean: {len(status.splitlines())} files")
    if f"v{version}" in tags:
        items.append(f"the tag v{version} exists: raise the version in CMakeLists.txt")
    for folder, option in WHEELS.items():
        if not any(name.startswith(f"{folder}/tessera_attention-{version}-py3-none-manylinux_") for name in wheels):
            items.append(f"{folder} has no wheel of {version}: ./dev wheel{option}")
    return items


def main() -> int:
    version = re.search(r"project\(tessera VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]
    wheels = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("build/dist/**/*.whl")]
    items = open_items(version, (ROOT / "CHANGELOG.md").read_text(), (ROOT / "CITATION.cff").read_text(),
                       (ROOT / "pyproject.toml").read_text(), git("status", "--porcelain"), git("tag").split(), wheels)
    for item in items:
        print(f"open: {item}")
    print(f"tessera {version}: {len(items)} items open; then docs/releasing.md from 5 on")
    return 1 if items else 0


if __name__ == "__main__":
    sys.exit(main())
