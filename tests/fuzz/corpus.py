# SPDX-License-Identifier: Apache-2.0
"""A corpus is one file of text, an input a line: \\n, \\\\, \\xNN, and other bytes as they are.

  corpus.py unpack FILE FOLDER   the inputs, as libFuzzer reads them
  corpus.py pack FOLDER FILE     and back, after `-merge=1`
"""
import hashlib
import pathlib
import re
import sys


def line_of(data: bytes) -> str:
    named = {0x0A: "\\n", 0x5C: "\\\\"}
    return "".join(named.get(b) or (chr(b) if 0x20 <= b < 0x7F else f"\\x{b:02x}") for b in data)


def bytes_of(line: str) -> bytes:
    def one(match):
        escape = match.group(1)
        return {"n": "\n", "\\": "\\"}.get(escape) or chr(int(escape[1:], 16))

    return re.sub(r"\\(n|\\|x[0-9a-f]{2})", one, line).encode("latin-1")


def unpack(file: str, folder: str) -> None:
    to = pathlib.Path(folder)
    to.mkdir(parents=True, exist_ok=True)
    for line in pathlib.Path(file).read_text().splitlines():
        data = bytes_of(line)
        (to / hashlib.sha1(data).hexdigest()).write_bytes(data)


def pack(folder: str, file: str) -> None:
    lines = {line_of(path.read_bytes()) for path in pathlib.Path(folder).iterdir()}
    pathlib.Path(file).write_text("".join(line + "\n" for line in sorted(lines)))


if __name__ == "__main__":
    {"pack": pack, "unpack": unpack}[sys.argv[1]](*sys.argv[2:])
