#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kernel_budget.py BUILD: no kernel spills more than it may or waits for each wgmma. Needs no GPU.

Reads the OBJECT.ptxas files that src/cuda/log_resources.sh leaves in the build folder, one for each
source that it compiles."""
import json
import pathlib
import re
import sys

# Bytes of spill stores that a kernel may have: the first line whose pattern is in "folder mangled name". What is there
# saves loop-invariant values, outside of the inner loops; kernels of every feature, and deterministic ones, which pass
# turns to others, have the most.
BUDGET = (
    (r"sm90 .*Row_backward_\w+_(rich|masks|segments)_deterministic", 352),
    (r"sm90 .*Row_backward_\w+_rich", 240),
    (r"sm90 .*Row_backward_\w+_masks", 108),
    (r"sm90 .*Row_forward_(d64|d256)_richE", 288),
    (r"sm90 .*Row_forward_\w+_richE", 72),
    (r"sm90 .*backward_dkdv", 72),
    (r"sm90 .*Row_backward_d128_(softcap|bias_deterministic)E", 44),
    # The diagonal at positions: 12 bytes more, one reload a block, and the same times (0.99 to 1.01 from 512 to 16k).
    (r"sm90 .*Row_backward_d128_leanE", 52),
    # Three consumers of 160 registers: eleven words a block of some 420 instructions, and 8 % faster than two without.
    (r"sm90 .*Row_fp8_d64(_lse|_blocks_lse)?E", 464),
    # Nine warps have 168 registers each: addresses of q, some 50 words of 1100 instructions of a block.
    (r"sm90 .*Row_decode_(d128_rows32|d256_rows16)", 288),
    # Nine words of four of the keys to come are in registers: what deals out the work, and some addresses of a block.
    (r"sm90 .*Row_mla_d576_512_e4m3E", 48),
    # 128 accumulators of O beside two heads: what a tile ends with; and what a loader of rows keeps from tile to tile,
    # outside of its loop over blocks.
    (r"sm90 .*Row_forward_d256_pairs_partsE", 44),
    (r"sm90 .*Row_forward_d256_pages_pairs(_parts)?E", 116),
    (r"sm90 .*Row_forward_d128_pages(_\w+)?E", 56),
    (r"sm90 ", 40),
    (r"sm80\w* .*backward_fused_lean_kernel.*Li256E", 352),
    (r"sm80\w* .*(lean_kernel|_kernelIf)", 320),
    (r"sm80\w* ", 88),
    # Heads above 256 have more columns than registers. Others keep a few values for what comes behind the rounding.
    (r"common .*round_(keys|rows)INS1_5BlockILi32E", 20000),
    (r"common .*round_(keys|rows)", 128),
    (r"(common|nvte|cudnn) ", 0),
)

# What ptxas says when it cannot keep wgmma asynchronous: half the speed.
SERIALISED = re.compile(r"\(C75\d\d\).*")

KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for '(?P<arch>\w+)'.*?"
    r"(?P<spill>\d+) bytes spill stores.*?Used (?P<registers>\d+) registers", re.S)


def main(build):
    kernels, over = 0, []
    commands = json.loads((pathlib.Path(build) / "compile_commands.json").read_text())
    objects = [re.search(r" -o (\S+\.cu\.o)", command["command"]) for command in commands]
    for log in sorted(pathlib.Path(build) / f"{object[1]}.ptxas" for object in objects if object):
        if not log.exists():
            over.append(f"{log.name}: missing; build all, with no other CMAKE_CUDA_COMPILER_LAUNCHER")
            continue
        text = log.read_text()
        room = re.search(r"/tessera_cuda_(\w+)\.dir/", str(log))[1]
        over += [f"{log.name}: {message}" for message in SERIALISED.findall(text)]
        if len(KERNEL.findall(text)) != text.count("Compiling entry function"):
            over.append(f"{log.name}: not understood")
        for kernel in KERNEL.finditer(text):
            kernels += 1
            spill = int(kernel["spill"])
            budget = next(bytes for pattern, bytes in BUDGET if re.search(pattern, f"{room} {kernel['name']}"))
            if spill > budget:
                over.append(f"{log.name[:-len('.o.ptxas')]} for {kernel['arch']}, {kernel['name']}: spills "
                            f"{spill} bytes with {kernel['registers']} registers; the budget is {budget}")
    print("\n".join(over))
    print(f"{kernels} kernels, {len(over)} over budget")
    return 1 if over or not kernels else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
