# SPDX-License-Identifier: Apache-2.0
"""A node of ComfyUI that gives a model tessera's attention: copy this folder to ComfyUI/custom_nodes/tessera, and put
"Attention by tessera" between a model's loader and the sampler. The model that goes in stays what it is."""

from tessera.doors import comfyui

_PLACE = "optimized_attention_override"


class TesseraAttention:
    CATEGORY = "advanced/attention"
    DESCRIPTION = "The model's attention by tessera; what it does not compute stays ComfyUI's, with a warning."
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "enabled": ("BOOLEAN", {"default": True})}}

    def patch(self, model, enabled):
        if not enabled:
            return (model,)
        patched = model.clone()
        options = dict(patched.model_options.get("transformer_options", {}))
        options[_PLACE] = comfyui.override(otherwise=options.get(_PLACE))
        patched.model_options["transformer_options"] = options
        return (patched,)


NODE_CLASS_MAPPINGS = {"TesseraAttention": TesseraAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"TesseraAttention": "Attention by tessera"}
