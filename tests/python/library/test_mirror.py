# SPDX-License-Identifier: Apache-2.0
"""The ctypes mirror of include/tessera.h: constants by reading the header, layouts by compiling it."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tessera import _call, _lib
from tessera._call import _keywords

HEADER = Path(__file__).resolve().parents[3] / "include" / "tessera.h"
TEXT = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
STRUCTS = {"tensor": _lib.Tensor, "problem": _lib.Problem, "buffers": _lib.Buffers,
           "device": _lib.Device, "info": _lib.Info, "error": _lib.Error,
           "rotate_args": _lib.RotateArgs, "append_args": _lib.AppendArgs}


def enum(name):
    body = re.search(rf"enum tessera_{name} {{(.*?)}};", TEXT, re.DOTALL)[1]
    entries = (entry.split("=") for entry in body.split(",") if entry.strip())
    return {key.strip().removeprefix("TESSERA_"): eval(value) for key, value in entries}


def test_tensors():
    values = enum("index")
    assert values.pop("NUM_TENSORS") == len(_lib.TENSORS)
    assert [name.lower() for name in sorted(values, key=values.get)] == list(_lib.TENSORS)
    assert sorted(values.values()) == list(range(len(_lib.TENSORS)))


@pytest.mark.parametrize("name, fields, args", [
    ("rotate", _lib.ROTATE_TENSORS, _lib.RotateArgs), ("append", _lib.APPEND_TENSORS, _lib.AppendArgs)])
def test_tensors_of_rotate_and_append(name, fields, args):
    values = enum(f"{name}_index")
    room = values.pop(f"{name.upper()}_TENSORS")
    assert len(args().tensor) == len(args().data) == room >= len(values)
    assert {key.removeprefix(f"{name.upper()}_").lower(): value for key, value in values.items()} == \
        {field: i for i, field in enumerate(fields)}


def test_enums():
    dtypes = {"FP32": "float32", "BF16": "bfloat16", "FP16": "float16", "FP64": "float64",
              "E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2", "BOOL": "bool", "INT32": "int32",
              "INT64": "int64"}
    values = enum("dtype")
    assert values.pop("NONE") == 0
    assert {dtypes[name]: value for name, value in values.items()} == _lib.DTYPES
    assert {name.lower(): value for name, value in enum("format").items()} == _lib.FORMATS
    aligns = {name.removeprefix("ALIGN_").lower(): v for name, v in enum("align").items()}
    assert aligns == {"none": 0, **_lib.ALIGNS, "given": _lib.ALIGN_GIVEN}
    for name, value in {**enum("code"), **enum("pass"), **enum("flags"), **enum("rotary_flags"),
                        **enum("device_kind")}.items():
        assert getattr(_lib, name) == value, name


def members(name):
    body = re.search(rf"typedef struct tessera_{name} {{(.*?)}} tessera_{name};", TEXT,
                     re.DOTALL)[1]
    return [re.search(r"(\w+)(\[\w+\])?$", line.strip())[1] for line in body.split(";")
            if line.strip()]


@pytest.mark.parametrize("name", STRUCTS)
def test_fields_in_order(name):
    fields = [field[0].rstrip("_") for field in STRUCTS[name]._fields_]
    assert members(name) == fields


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_layouts(tmp_path):
    lines, expected = [], []
    for name, mirror in STRUCTS.items():
        lines.append(f'printf("%zu\\n", sizeof(tessera_{name}));')
        expected.append(ctypes.sizeof(mirror))
        for field, *_ in mirror._fields_:
            member = field.rstrip("_")
            lines.append(f'printf("%zu\\n", offsetof(tessera_{name}, {member}));')
            expected.append(getattr(mirror, field).offset)
    source = tmp_path / "layout.c"
    source.write_text('#include <stdio.h>\n#include "tessera.h"\n'
                      "int main(void) {" + "\n".join(lines) + "return 0;}")
    subprocess.run(["cc", "-I", HEADER.parent, source, "-o", tmp_path / "layout"], check=True)
    out = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout
    assert list(map(int, out.split())) == expected


def test_fields_are_those_of_core():
    rows = re.findall(r"^TESSERA_(FLAG|TOKEN|WORD|INTEGER|NUMBER|TEXT)\((.*)\)$", (
        HEADER.parents[1] / "src" / "core" / "problem" / "fields.def").read_text(), re.MULTILINE)
    expected = {}
    for kind, row in rows:
        first, second, *rest = row.split(", ")
        kind = kind.replace("TOKEN", "FLAG")
        flag = first if kind == "FLAG" else rest[0] if kind in ("INTEGER", "NUMBER") else "0"
        expected[second] = (kind.lower(), getattr(_lib, flag.removeprefix("TESSERA_"), 0),
                            tuple(rest[0].strip('"').split()) if kind == "WORD" else ())
    assert expected == {name: tuple(field) for name, field in _call.FIELDS.items()}


def test_every_scalar_of_the_structs_is_a_field():
    """Less those that say where or how, and no part of what is computed."""
    where = {"num_threads", "stream", "parallel_for", "parallel_context", "workspace", "workspace_bytes",
             "interrupt", "allocate", "allocate_context"}
    scalars = {name for struct in ("problem", "buffers") for name in members(struct)
               if not name.startswith("reserved")} - {"struct_size", "flags", "tensor", "data"} - where
    flags = {name.lower() for name in enum("flags")} - \
        {"window", "softmax_scale", "softcap", "dropout", "max_seqlen_q", "max_seqlen_k"}
    assert scalars | flags == _call.FIELDS.keys()
    encoded = {field for row in _keywords.ALL.values() if isinstance(row, _keywords.Option)
               for field in row.fields if hasattr(_lib.Problem, field)}
    assert encoded <= _call.FIELDS.keys()
