# SPDX-License-Identifier: Apache-2.0
"""Small configurations of any architecture of transformers, from nothing but the names of its fields."""
import re

MOST = 30_000_000  # elements of weights, of a configuration that keeps its widths
# (name of a field, what it becomes); the first that matches is taken. Heads, and what is as many.
COUNTS = [
    (r"vocab(ulary)?_size|.*_vocab_size|vocab_size_.*|n_tokens", 128),
    (r"(num|n)_.*experts_per_tok|moe_k|top_?k|moe_top_?k|.*_topk|num_experts_per_.*|num_selected_experts", 2),
    (r"n_groups?|num_expert_groups?|topk_group|n_shared_experts|num_shared_experts", 1),
    (r"(num_|n_)?(local_|routed_)?experts|num_experts|n_routed_experts|moe_num_experts|num_local_experts", 4),
    (r"num_hidden_groups|num_codebooks|first_k_dense_replace|num_nextn_predict_layers|mtp_num_layers", 1),
    (r"(num_|n_)?(hidden_|encoder_|decoder_|text_|transformer_|attention_)?(layers?|blocks)|depth|"
     r"num_.*layers|n_layers?|.*_layers|encoder_num_hidden_layers", 2),
    (r"max_(source_|target_)?positions?|max_position_embeddings|n_positions|n_ctx|seq_len(gth)?", 64),
    (r"sliding_window|attention_chunk_size|window_size_text", 5),
]
WIDTHS = [
    (r".*(kv_heads|key_value_heads|num_kv_heads|n_head_kv|num_heads_kv)", "kv"),
    (r".*(attention_heads|num_heads|n_heads?|_heads)|heads", 4),
    (r"rotary_dim", 4), (r"qk_head_dim", 16), (r"(mamba_n|mamba_num|n_mamba|mamba)_heads", 8),
    (r"mamba_d_head|mamba_headdim|mamba_head_dim", 8),
    (r"head_dim|d_head|.*_head_dim|d_kv|kv_channels|head_size|attention_head_size|attention_head_dim", 8),
    (r".*lora_rank", 16),
    (r".*(intermediate|ffn|feed_?forward|mlp|inner|d_ff).*(size|dim|_d)?|n_inner|d_ff", 48),
    (r".*(hidden_size|embed_dim|hidden_dim|embedding_size|n_embd|d_model|model_dim|emb_dim|embed_size|"
     r"projection_dim|embedding_dim|out_hidden_size|vision_dim|encoder_dim|decoder_dim)|dim|width|"
     r"d_embed|hidden|hidden_size_per_layer_input", 32),
    (r"image_size|img_size|input_size", 32), (r"patch_size|spatial_patch_size", 8),
    (r"vocab_size_per_layer_input", 128),
]

# What a configuration works out from the others, by layers that are no more.
DERIVED = {"attention_layers", "stage_names", "out_features", "out_indices", "per_layer_config",
           "_out_features", "_out_indices"}


def tiny_configs(cls):
    """Configurations of one class, the smallest first; the later ones keep more as it is by default."""
    default = cls().to_dict()
    for rules, narrow in ((COUNTS + WIDTHS, True), (COUNTS, False), (COUNTS[:6], False)):
        yield cls.from_dict(shrunk(default, rules, narrow))


def shrunk(fields: dict, rules, narrow: bool) -> dict:
    """A configuration's fields by the rules; configurations inside it too."""
    out, dropped = {}, 0
    for name, value in fields.items():
        if name in DERIVED:
            continue
        if isinstance(value, dict):
            if name in ("rope_parameters", "rope_scaling"):
                out[name] = rope(value, narrow)
            elif name in ("id2label", "label2id"):
                continue
            else:
                out[name] = shrunk(value, rules, narrow)
        elif name == "head_dim" and value is None and narrow:
            out[name] = 8
        elif isinstance(value, int) and not isinstance(value, bool):
            as_many = value == fields.get("num_attention_heads", 0)
            out[name] = number(name, value, rules, 4 if as_many else 2)
        else:
            out[name] = value
    layers = next((key for key in ("num_hidden_layers", "num_layers", "n_layer") if key in out), None)
    types = [key for key in out if key.endswith(("layer_types", "layers_block_type")) and
             isinstance(out[key], list)]
    if layers and types:
        kinds = [list(dict.fromkeys(out[key])) for key in types]
        out[layers] = max(2, *map(len, kinds))
        for key, each in zip(types, kinds):
            out[key] = (each * out[layers])[:out[layers]]
    if "attention_types" in out:  # GPT-Neo's
        out["attention_types"] = [[["global", "local"], 1]]
    for key in out:  # tokens that mean something lie inside the vocabulary, away from the text's
        if key.endswith(("token_id", "token_index", "_token")) and isinstance(out[key], int):
            if out[key] >= 96:
                dropped += 1
                out[key] = 96 + dropped
        elif key.endswith("token_id") and isinstance(out[key], list):
            out[key] = [2]
    return out


def number(name: str, value: int, rules, kv_heads: int) -> int:
    if value <= 0 or re.search("conv|feat_extract|token", name):
        return value
    for pattern, small in rules:
        if re.fullmatch(pattern, name):
            if small == "kv":
                return min(value, kv_heads)
            return min(value, small)
    return value


def rope(value: dict, narrow: bool) -> dict:
    out = dict(value)
    for key, each in value.items():
        if isinstance(each, dict):
            out[key] = rope(each, narrow)
    if narrow and ("mrope_section" in out or "rope_type" in out):  # Qwen's models have one by default
        out["mrope_section"] = [2, 1, 1]
    return out
