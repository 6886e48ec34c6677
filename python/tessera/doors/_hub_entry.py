# SPDX-License-Identifier: Apache-2.0
"""The entry of a kernel of Hugging Face's hub, where hub_kernel.py copies it: the package `tessera` beside it becomes
importable under its own name, as PyTorch's dispatcher has its operators once in a process."""

import importlib.util
import json
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_VERSION = json.loads((_HERE / "metadata.json").read_text(encoding="utf-8"))["tessera-version"]


def _load():
    loaded = sys.modules.get("tessera")
    if loaded is None:
        place = _HERE / "tessera" / "__init__.py"
        spec = importlib.util.spec_from_file_location("tessera", place, submodule_search_locations=[str(place.parent)])
        loaded = sys.modules["tessera"] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(loaded)
        except BaseException:
            del sys.modules["tessera"]
            raise
    if loaded.__version__ != _VERSION:
        raise ImportError(f"tessera: version {loaded.__version__} is imported already, and the kernel in {_HERE} holds "
                          f"{_VERSION}; a process has one: import neither before the other, or make them the same")


_load()

from tessera.hf import attention_forward as flash_attn_forward  # noqa: E402

# What transformers looks for beside flash_attn_forward: models that have a FlashAttention may run this.
supports_flash_attn = True

__all__ = ["flash_attn_forward", "supports_flash_attn"]
