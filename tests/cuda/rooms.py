#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""rooms.py LIBRARY: which CUDA room takes a problem, by which kernel, and why the others do not, as tessera_explain
says; that every case of the files has a room on every architecture; that each room refuses what tests/cases/refused.*
says; and that each kernel of the tables is reached by a case. Needs no GPU, and no CUDA in the library: the
architecture is given, and rules and tables are in every build."""
import ctypes
import fnmatch
import functools
import json
import pathlib
import sys

CASES = pathlib.Path(__file__).resolve().parents[1] / "cases"
ARCHITECTURES = (80, 86, 87, 89, 90, 100, 103, 120)
SMALL = (86, 89, 120)  # 99 KB of shared memory: too little for the widest heads of fp32 backward

NOT_HERE = {"not_built", "not_loaded"}  # of this build and machine, not of the rules

# (architecture, case, room that takes it, its kernels, {room: a reason of it, or why it yields})
EXPECTED = (
    (90, "fwd bf16 b=2 s=8192 h=16 d=128 causal", "cuda_sm90", "sm90/forward/d128_lean", {}),
    (90, "fwd bf16 b=64 s=512 h=16 d=64 causal", "cuda_sm90", "sm90/forward/d64_lean_lone", {}),
    (90, "fwd bf16 b=2 s=8192 h=16 d=64 causal", "cuda_sm90", "sm90/forward/d64_lean", {}),
    (90, "fwd bf16 b=1 s=1000 h=4 dqk=576 dv=512", "cuda_sm90", "sm90/wide/d576_512", {}),
    (90, "bwd fp16 b=2 s=4096 h=16 d=64 softcap=30", "cuda_sm90", "sm90/backward/d64_softcap", {}),
    (90, "bwd bf16 b=1 s=2048 h=4 d=128 causal deterministic", "cuda_sm90", "sm90/backward/d128_lean_deterministic",
     {"cudnn": "deterministic=True: cuDNN's workspace is quadratic then, on sm90"}),
    (90, "bwd bf16 b=1 s=2048 h=16 d=256 alibi grads=dalibi_slopes", "cuda_sm90",
     "sm90/backward/d256_rich, sm90/dbias/d256_rich", {}),
    (90, "bwd bf16 b=64 s=256 h=16 d=64", "cuda_sm90", "sm90/backward/apart/d64", {}),
    (80, "fwd bf16 b=1 s=128 h=2 d=64", "cuda_sm80", "sm80/forward/d64_lean",
     {"cuda_sm90": "arch=80: must be 90 (Hopper)"}),
    (80, "bwd bf16 b=1 s=128 h=2 d=128", "cuda_sm80", "sm80/backward/fused_d128_lean_small", {}),
    (89, "bwd bf16 b=1 s=128 h=2 d=128", "cuda_sm80", "sm80/backward/fused_d128_lean_smaller", {}),
    (100, "bwd fp16 b=1 s=128 h=2 d=64", "cuda_sm80", "sm80/backward/fused_d64_lean",
     {"cuda_sm90": "arch=100: must be 90 (Hopper)"}),
    (100, "fwd bf16 b=2 s=128 h=4 d=128 causal", "cudnn", None, {}),
    (103, "fwd fp16 b=3 s=128 h=4 d=64 layout=thd lens=random:7", "cudnn", None, {}),
    (90, "fwd bf16 b=2 s=128 h=4 d=64", "cuda_sm90", "sm90/forward/d64_lean_low",
     {"cudnn": "arch=90: cuda_sm90 is faster (1.15 to 1.58 times)"}),
    (90, "bwd bf16 b=2 s=128 h=4 d=64", "cuda_sm90", "sm90/backward/apart/d64",
     {"cudnn": "arch=90: cuda_sm90 is faster (1.18 to 1.65 times)"}),
    (100, "bwd bf16 b=2 s=128 h=4 d=128 causal", "cuda_sm80", "sm80/backward/fused_d128_lean",
     {"cudnn": "pass=backward, arch=100: cuDNN's dq has been checked on sm90 alone, where it needs a repair"}),
    (120, "fwd bf16 b=2 s=128 h=4 d=64", "cuda_sm80", "sm80/forward/d64_lean",
     {"cudnn": "arch=120: nobody has timed cuDNN on it; cudnn runs by name"}),
    (100, "fwd bf16 b=2 sq=1 sk=600 hq=8 hk=2 d=64 lens_k=random:3", "cuda_sm80", "sm80/stream/d64_rows8",
     {"cudnn": "sq=1: beside lengths, must be at least 2; cuDNN 9.19 leaves lse of heads unwritten"}),
    (100, "fwd bf16 b=3 sq=1 sk=600 hq=8 hk=2 d=64 layout=thd lens_k=random:3", "cudnn", None, {}),
    (75, "fwd bf16 b=1 s=128 h=2 d=64", None, None, {"cuda_sm80": "arch=75: must be 80 or later"}),
    (90, "fwd fp32 b=1 s=128 h=2 d=64", "cuda_sm80", "sm80/forward/d64_fp32_lean",
     {"cuda_sm90": "q.dtype=fp32: must be bf16, fp16 or e4m3"}),
    (90, "fwd fp64 b=1 s=128 h=2 d=64", None, None,
     {"cuda_sm80": "q.dtype=fp64: must be fp32, bf16, fp16, e4m3 or e5m2"}),
    (90, "fwd e4m3 b=1 s=64 h=1 d=64", "cuda_sm90", "sm90/fp8/d64_low_lse", {}),
    (90, "fwd e4m3 b=8 s=256 h=16 d=64 no_lse", "cuda_sm90", "sm90/fp8/d64", {}),
    (90, "fwd e4m3 b=1 s=64 h=1 d=256", "cuda_sm80", "sm80/forward/d256_fp32_rich",
     {"cuda_sm90": "head_dim_qk=256, head_dim_v=256: must be at most 192 and 128 in fp8"}),
    (90, "fwd e4m3 b=1 s=64 h=1 d=64 softcap=5", "cuda_sm80", "sm80/forward/d64_fp32_rich",
     {"cuda_sm90": "a mask, bias, softcap or dropout beside products in fp8: the fp8 kernels of Hopper do not have it; "
                   "cuda_sm80 does"}),
    (90, "fwd bf16 b=1 s=4096 h=16 d=128 causal precision=fp8", "cuda_sm90", "sm90/fp8/d128_blocks_lse", {}),
    (90, "fwd fp16 b=8 s=256 h=16 d=64 no_lse precision=fp8", "cuda_sm90", "sm90/fp8/d64_blocks_lse", {}),
    (90, "fwd bf16 b=1 s=64 h=1 d=64 softcap=5 precision=fp8", "cuda_sm80", "sm80/forward/d128_shaped", {}),
    (89, "bwd bf16 b=1 s=64 h=1 d=256 precision=fp8", None, None,
     {"cuda_sm80": "head_dim_qk=256, head_dim_v=256: must be at most 247 with precision=\"fp8\", which needs columns "
                   "of its own"}),
    (80, "bwd e5m2 b=1 s=64 h=1 d=64 qscale=row kvscale=block do=e4m3 grad=e5m2 amax", "cuda_sm80",
     "sm80/backward/fused_d64_fp32_lean", {}),
    (90, "fwd e4m3 b=2 s=64 h=2 d=64 page=16", None, None,
     {"cuda_sm80": "page_table.shape=[2, 4]: pages of fp8 need q in bf16 or fp16"}),
    (89, "bwd e4m3 b=1 s=64 h=1 d=576", None, None,
     {"cuda_sm80": "head_dim=576: in e4m3 needs more shared memory than this device has; must be at most 256"}),
    (90, "fwd bf16 b=1 s=64 h=1 d=64 kv=e4m3", "cuda_sm80", "sm80/stream/d64_rows64_e4m3",
     {"cuda_sm90": "k.dtype=e4m3: must be that of q"}),
    (90, "fwd bf16 b=1 s=128 h=2 d=36", "cuda_sm80", "sm80/forward/d64_rich",
     {"cuda_sm90": "head_dim_qk=36: must be a multiple of 8"}),
    (90, "fwd bf16 b=1 s=64 h=1 d=64 strided", "cuda_sm80", "sm80/forward/d64_rich",
     {"cuda_sm90": "q.stride[1]=67: must be a positive multiple of 8 elements"}),
    (90, "fwd bf16 b=2 s=64 h=2 d=64 page=12", "cuda_sm90", "sm90/forward/d64_pages", {}),
    (90, "fwd bf16 b=2 s=65 h=2 d=64 page=16", "cuda_sm90", "sm90/forward/d64_pages", {}),
    (90, "fwd bf16 b=2 sq=64 sk=300 hq=8 hk=2 d=128 page=16", "cuda_sm90", "sm90/forward/d128_pages_pairs", {}),
    (90, "fwd bf16 b=3 sq=200 sk=300 hq=8 hk=2 d=128 layout=paged_kv_thd_bshd_bshd lens_q=1,200,3 page=16", "cuda_sm90",
     "sm90/forward/d128_pages, sm90/decode/d128_rows8", {}),
    (90, "fwd bf16 b=2 s=65 h=2 d=64 page=16 batch_invariant", "cuda_sm80", "sm80/forward/d64_rich",
     {"cuda_sm90": "page_table: the Hopper kernels do not have it"}),
    (90, "fwd bf16 b=2 sq=5 sk=300 hq=8 hk=2 d=128 page=16 kv=e4m3", "cuda_sm90", "sm90/decode/d128_rows32_e4m3", {}),
    (90, "fwd bf16 b=2 sq=5 sk=300 hq=8 hk=2 d=128 page=1 kv=e4m3", "cuda_sm80", "sm80/stream/d128_rows32_e4m3", {}),
    (90, "fwd bf16 b=2 sq=1 sk=300 hq=128 hk=1 dqk=576 dv=512 vink kv=e4m3", "cuda_sm90", "sm90/mla/d576_512_pair_e4m3",
     {}),
    (90, "fwd bf16 b=2 sq=1 sk=300 hq=128 hk=1 dqk=576 dv=512 vink page=1", "cuda_sm90", "sm90/mla/d576_512_pair_rows",
     {}),
    (90, "fwd bf16 b=2 sq=1 sk=300 hq=16 hk=1 dqk=576 dv=512 vink page=24", "cuda_sm90", "sm90/mla/d576_512_rows", {}),
    (90, "fwd bf16 b=2 sq=1 sk=300 hq=8 hk=2 d=128 kv=e5m2", "cuda_sm90", "sm90/decode/d128_rows8_e5m2", {}),
    (90, "fwd bf16 b=2 sq=1 sk=300 hq=8 hk=2 d=128 softcap=10", "cuda_sm80", "sm80/decode/d128_rich", {}),
    (90, "fwd bf16 b=1 sq=1 sk=8192 hq=32 hk=8 d=128", "cuda_sm90", "sm90/decode/d128_rows8", {}),
    (90, "fwd bf16 b=136 s=256 h=8 d=80 causal", "cuda_sm90", "sm90/forward/d128_lean", {}),
    (90, "fwd bf16 b=2 s=2048 h=8 d=80 causal", "cuda_sm90", "sm90/forward/d96_lean", {}),
    (90, "bwd bf16 b=303 s=256 h=4 d=72", "cuda_sm90", "sm90/backward/apart/d128", {}),
    (90, "bwd bf16 b=16 s=1024 h=12 d=96 causal", "cuda_sm90", "sm90/backward/d96_lean", {}),
    (90, "fwd bf16 b=1 sq=1 sk=8192 hq=64 hk=1 d=128", "cuda_sm90", "sm90/forward/d128_eights_parts", {}),
    (90, "fwd bf16 b=8 sq=8 sk=8192 hq=32 hk=8 d=128 page=16", "cuda_sm90", "sm90/forward/d128_pages_fours_parts", {}),
    (90, "fwd bf16 b=8 sq=512 sk=8192 hq=32 hk=8 d=128 page=16 kv=e4m3", "cuda_sm90",
     "sm90/forward/d128_pages_e4m3", {}),
    (90, "fwd bf16 b=8 sq=16 sk=8192 hq=32 hk=8 d=128 page=16 kv=e4m3", "cuda_sm80", "sm80/stream/d128_rows64_e4m3",
     {"cuda_sm90": "sq=16: cuda_sm80 decodes up to 16 queries faster"}),
    (90, "fwd bf16 b=4 sq=4 sk=8192 hq=64 hk=4 d=128 page=1", "cuda_sm80", "sm80/stream/d128_rows64",
     {"cuda_sm90": "sq=4: cuda_sm80 decodes up to 8 queries faster"}),
    (90, "fwd bf16 b=2 sq=1 sk=300 hq=8 hk=2 d=128 page=1", "cuda_sm80", "sm80/stream/d128_rows8", {}),
    (90, "fwd bf16 b=1 sq=128 sk=8192 h=8 d=128", "cuda_sm90", "sm90/forward/d128_parts", {}),
    (90, "fwd bf16 b=1 sq=64 sk=8192 hq=32 hk=8 d=128 page=16", "cuda_sm90", "sm90/forward/d128_pages_pairs_parts", {}),
    (90, "fwd bf16 b=1 sq=128 sk=8192 h=8 d=128 batch_invariant", "cuda_sm90", "sm90/forward/d128_lean", {}),
    (90, "fwd bf16 b=2 s=197 h=2 d=64 bias=post/hqk", "cuda_sm90", "sm90/forward/d64_bias", {}),
    (90, "fwd bf16 b=2 s=197 h=2 d=64 bias=post/k", "cuda_sm90", "sm90/forward/d64_rich", {}),
    (90, "fwd bf16 b=2 s=197 h=2 d=64 bias=post/hqk batch_invariant", "cuda_sm90", "sm90/forward/d64_rich", {}),
    (90, "bwd bf16 b=4 s=196 h=2 d=64 bias=post/bhqk grads=dbias", "cuda_sm90",
     "sm90/backward/d64_bias, sm90/dbias/d64_plain", {}),
    (90, "bwd bf16 b=1 s=128 h=2 d=256 alibi", "cuda_sm90", "sm90/backward/d256_rich", {}),
    (90, "bwd bf16 b=1 s=128 h=2 d=512", "cuda_sm80", "sm80/backward/dq_d576, sm80/backward/dkdv_d576",
     {"cuda_sm90": "head_dim_qk=512: and head_dim_v must be at most 256 in the backward pass"}),
    (90, "fwd bf16 b=1 s=64 h=1 d=577", None, None, {"cuda_sm80": "head_dim_qk=577: must be at most 576"}),
    (89, "bwd fp32 b=1 s=64 h=1 d=576", None, None,
     {"cuda_sm80": "head_dim=576: in fp32 needs more shared memory than this device has; must be at most 256"}),
)

# Kernels that no case reaches, and why.
UNREACHED: dict[str, str] = {}


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


def own_reasons(entry):
    return [reason["text"] for reason in entry["reasons"] if reason["id"] not in NOT_HERE]


def rooms_of(said):
    """{room: its entry} of the CUDA rooms that the rules let run it, the one that takes it first."""
    able = [entry for entry in said["backends"]
            if entry["name"].startswith(("cuda", "cudnn")) and not own_reasons(entry)]
    return {entry["name"]: entry for entry in sorted(able, key=lambda entry: entry["yields"] is not None)}


def is_refused(case, rules):
    """As the runner of cases reads refused.*: each word of a rule matches a word of the case, in its canonical text."""
    words = case.split()
    return any(all(any(fnmatch.fnmatchcase(word, glob.lstrip("!")) for word in words) != glob.startswith("!")
                   for glob in rule.split()) for rule in rules)


def lines_of(name):
    lines = (line.split("#")[0].strip() for line in (CASES / name).read_text().splitlines())
    return [line for line in lines if line]


def check_expected(explain):
    for arch, case, room, kernels, texts in EXPECTED:
        said = explain(case, arch)
        rooms = rooms_of(said)
        found = next(iter(rooms), None)
        if found != room or room and rooms[room]["kernel"] != kernels:
            kernel = rooms[found]["kernel"] if found else None
            yield f"{case} on sm{arch}: {found} takes it, by {kernel}; not {room}, {kernels}"
        for entry in said["backends"]:
            text = texts.get(entry["name"])
            if text and text not in own_reasons(entry) + [entry["yields"]]:
                yield (f"{case} on sm{arch}: {entry['name']} does not say {text!r}, but {own_reasons(entry)}, "
                       f"{entry['yields']}")


def check_rooms(explain, answers):
    """Each of smoke.cases and ci.cases runs on every architecture, in the rooms that do not refuse it by rule."""
    of_all = lines_of("refused.cuda")
    rules = {"cuda_sm80": of_all, "cuda_sm90": of_all + lines_of("refused.cuda_sm90"),
             "cudnn": lines_of("refused.cudnn")}
    for case in lines_of("smoke.cases") + lines_of("ci.cases"):
        for arch in ARCHITECTURES:
            said = answers(case, arch)
            rooms = rooms_of(said)
            wide = arch in SMALL and case.startswith("bwd") and any(
                "shared memory" in text or "columns of its own" in text
                for entry in said["backends"] for text in own_reasons(entry))
            for room in ("cuda_sm80",) if arch != 90 else rules:
                refused = is_refused(said["case"], rules[room])
                if (room in rooms) == (refused or wide):
                    yield (f"{case} on sm{arch}: {sorted(rooms)} can run it; the rules of {room}, in refused.*, "
                           "say otherwise")


def check_kernels(names, answers):
    """Each kernel is the one, on some architecture, of a case of the files that the GPU tests run."""
    missing = set(names)
    for case in lines_of("smoke.cases") + lines_of("ci.cases") + lines_of("nightly.cases"):
        for arch in (90, 80, 89):
            for entry in rooms_of(answers(case, arch)).values():
                missing -= set(entry["kernel"].split(", ")) if entry["kernel"] else set()
        if not missing:
            break
    yield from (f"{name}: no case reaches it" for name in sorted(missing - set(UNREACHED)))
    yield from (f"{name}: UNREACHED lists it, but a case reaches it" for name in sorted(set(UNREACHED) - missing))


def kernel_names(path):
    library = ctypes.CDLL(path)
    library.tessera_describe.restype = ctypes.c_int64
    answer = ctypes.create_string_buffer(1 << 18)
    error = Error(ctypes.sizeof(Error))
    library.tessera_describe(answer, ctypes.c_int64(len(answer)), ctypes.byref(error))
    return [name for backend in json.loads(answer.value)["backends"] if backend["name"].startswith("cuda")
            for name in backend["description"]["kernels"]]


def main(path):
    explain = explainer(path)
    answers = functools.cache(explain)
    names = kernel_names(path)
    wrong = [*check_expected(explain), *check_rooms(explain, answers), *check_kernels(names, answers)]
    print("\n".join(wrong))
    print(f"{len(names)} kernels, {answers.cache_info().misses} questions, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
