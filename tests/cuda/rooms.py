#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""rooms.py LIBRARY: which CUDA room takes a problem and why the other does not, as tessera_explain says; and that
every case of the files has a room on every architecture. Needs no GPU: the architecture is given."""
import collections
import ctypes
import fnmatch
import json
import pathlib
import sys

CASES = pathlib.Path(__file__).resolve().parents[1] / "cases"
ARCHITECTURES = (80, 86, 87, 89, 90, 100, 120)
SMALL = (86, 89, 120)  # 99 KB of shared memory: too little for the widest heads of fp32 backward

# (architecture, case, room that takes it, {room: a reason of it})
EXPECTED = (
    (90, "fwd bf16 b=2 s=8192 h=16 d=128 causal", "cuda_sm90", {}),
    (90, "bwd fp16 b=2 s=4096 h=16 d=64 softcap=30", "cuda_sm90", {}),
    (90, "bwd bf16 b=1 s=2048 h=4 d=128 causal deterministic", "cuda_sm90", {}),
    (80, "fwd bf16 b=1 s=128 h=2 d=64", "cuda_sm80", {"cuda_sm90": "arch=80: must be 90 (Hopper)"}),
    (100, "bwd fp16 b=1 s=128 h=2 d=64", "cuda_sm80", {"cuda_sm90": "arch=100: must be 90 (Hopper)"}),
    (75, "fwd bf16 b=1 s=128 h=2 d=64", None, {"cuda_sm80": "arch=75: must be 80 or later"}),
    (90, "fwd fp32 b=1 s=128 h=2 d=64", "cuda_sm80", {"cuda_sm90": "q.dtype=fp32: must be bf16 or fp16"}),
    (90, "fwd fp64 b=1 s=128 h=2 d=64", None, {"cuda_sm80": "q.dtype=fp64: must be fp32, bf16 or fp16"}),
    (90, "fwd e4m3 b=1 s=64 h=1 d=64", None, {"cuda_sm80": "q.dtype=e4m3: must be fp32, bf16 or fp16"}),
    (90, "fwd bf16 b=1 s=64 h=1 d=64 kv=e4m3", "cuda_sm80", {"cuda_sm90": "k.dtype=e4m3: must be that of q"}),
    (90, "fwd bf16 b=1 s=128 h=2 d=36", "cuda_sm80",
     {"cuda_sm90": "head_dim_qk=36: must be a multiple of 8"}),
    (90, "fwd bf16 b=1 s=64 h=1 d=64 strided", "cuda_sm80",
     {"cuda_sm90": "q.stride[1]=67: must be a positive multiple of 8 elements"}),
    (90, "fwd bf16 b=2 s=64 h=2 d=64 page=16", "cuda_sm80",
     {"cuda_sm90": "page_table: the Hopper kernels do not have it"}),
    (90, "fwd bf16 b=1 sq=1 sk=8192 hq=32 hk=8 d=128", "cuda_sm80",
     {"cuda_sm90": "sq=1: must be more than 16; cuda_sm80 decodes faster"}),
    (90, "bwd bf16 b=1 s=128 h=2 d=256 alibi", "cuda_sm90", {}),
    (90, "bwd bf16 b=1 s=128 h=2 d=512", "cuda_sm80",
     {"cuda_sm90": "head_dim_qk=512: and head_dim_v must be at most 256 in the backward pass"}),
    (90, "fwd bf16 b=1 s=64 h=1 d=577", None, {"cuda_sm80": "head_dim_qk=577: must be at most 576"}),
    (89, "bwd fp32 b=1 s=64 h=1 d=576", None,
     {"cuda_sm80": "head_dim=576: in fp32 needs more shared memory than this device has; must be at most 256"}),
)


class Device(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("kind", "ordinal", "arch", "reserved")]


class Error(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("code", ctypes.c_int32), ("message", ctypes.c_char * 2048)]


def explainer(path):
    library = ctypes.CDLL(path)
    library.tessera_explain.restype = ctypes.c_int64
    answer = ctypes.create_string_buffer(1 << 16)

    def explain(case, arch):
        error = Error(ctypes.sizeof(Error))
        size = library.tessera_explain(None, case.encode(), ctypes.byref(Device(1, 0, arch)), answer,
                                       ctypes.c_int64(len(answer)), ctypes.byref(error))
        if not 0 <= size <= len(answer):
            raise SystemExit(f"{case}: {error.message.decode() or 'the answer is too long'}")
        return json.loads(answer.value)
    return explain


def is_refused(case, rules):
    """As the runner of cases reads refused.*: each word of a rule matches a word of the case."""
    words = case.split()
    return any(all(any(fnmatch.fnmatchcase(word, glob.lstrip("!")) for word in words) != glob.startswith("!")
                   for glob in rule.split()) for rule in rules)


def lines_of(name):
    lines = (line.split("#")[0].strip() for line in (CASES / name).read_text().splitlines())
    return [line for line in lines if line]


def main(path):
    explain = explainer(path)
    wrong = []
    for arch, case, room, reasons in EXPECTED:
        said = explain(case, arch)
        if said["backend"] != room:
            wrong.append(f"{case} on sm{arch}: {said['backend']} takes it, not {room}; {said['reasons']}")
        wrong += [f"{case} on sm{arch}: {name} does not say {text!r}, but {said['reasons'][name]}"
                  for name, text in reasons.items() if text not in said["reasons"][name]]
    taken = collections.Counter()
    rules = lines_of("refused.cuda_sm80")
    for case in lines_of("smoke.cases") + lines_of("ci.cases"):
        for arch in ARCHITECTURES:
            said = explain(case, arch)
            taken[said["backend"]] += 1
            wide = arch in SMALL and any("shared memory" in reason for reason in said["reasons"]["cuda_sm80"])
            refused = is_refused(case, rules) or wide and case.startswith("bwd fp32")
            if (said["backend"] is None) != refused:
                wrong.append(f"{case} on sm{arch}: {said['backend']} takes it; {said['reasons']}")
    print("\n".join(wrong))
    print(f"{dict(taken)}, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
