# SPDX-License-Identifier: Apache-2.0
"""What is said about TE's names that are not here."""

# TE's attention that tessera does not have yet, and what to use meanwhile.
LATER = {
    "MultiheadAttention": "project with torch.nn.Linear and call DotProductAttention",
    "TransformerLayer": "build the layer from torch.nn and DotProductAttention",
    "InferenceParams": "give tessera.torch.attention a page_table or seqlens_k",
    "RotaryPositionEmbedding": "rotate query_layer and key_layer before DotProductAttention",
    "apply_rotary_pos_emb": "rotate query_layer and key_layer before DotProductAttention",
    "apply_fused_qkv_rotary_pos_emb": "rotate query_layer and key_layer before DotProductAttention",
    "attn_forward_func_with_cp": "merge the parts of each rank with tessera.torch.merge",
    "combine_and_quantize": "pass 16-bit tensors",
    "combine_and_dequantize": "pass 16-bit tensors",
}


def missing(module: str):
    """A module's __getattr__: why TE's name is not in it."""
    def __getattr__(name: str):
        if name in LATER:
            raise AttributeError(f"{module}.{name}: tessera does not have this part of TE's "
                                 f"attention yet; {LATER[name]}")
        raise AttributeError(f"{module}.{name}: tessera has TE's attention only; import what is "
                             "not attention from transformer_engine")
    return __getattr__
