# SPDX-License-Identifier: Apache-2.0
# example (jax): a door: a flax layer written for TransformerEngine, as MaxText's, on tessera
"""A layer of flax that imports TransformerEngine's DotProductAttention where it calls it, as MaxText's attention
cudnn_flash_te does, runs on tessera inside install(): packed documents, compared with plain JAX. After the block the
name transformer_engine is gone again. TransformerEngine need not be installed.

    ./dev example doors/te_jax                          (seconds on a CPU)
    ./dev example doors/te_jax --device cuda
"""
import argparse

import flax.linen
import jax
import jax.numpy as jnp

from tessera.doors import te_jax


class Attention(flax.linen.Module):
    """Causal attention within each document of a packed row."""

    @flax.linen.compact
    def __call__(self, q, k, v, segments, positions):
        from transformer_engine.jax.attention import SequenceDescriptor
        from transformer_engine.jax.flax.transformer import DotProductAttention
        descriptor = SequenceDescriptor.from_segment_ids_and_pos(
            segment_ids=segments, segment_pos=positions, is_thd=True, is_segment_ids_reordered=False)
        layer = DotProductAttention(
            head_dim=q.shape[-1], num_attention_heads=q.shape[2], num_gqa_groups=k.shape[2],
            attn_mask_type="padding_causal", qkv_layout="THD_THD_THD", transpose_batch_sequence=False,
            max_segments_per_seq=4)
        return layer(q, k, v, sequence_descriptor=descriptor)


def plain(q, k, v, segments, _):
    seen = jnp.tril(segments[:, :, None] == segments[:, None, :])
    return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = jax.devices(parser.parse_args(argv).device)[0]
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 12, heads, 16)) for i, heads in enumerate((4, 2, 2)))
    segments, positions = jnp.array([[1] * 5 + [2] * 4 + [3] * 3]), jnp.array([[*range(5), *range(4), *range(3)]])
    given = jax.device_put((q, k, v, segments, positions), device)
    with te_jax.install():
        run = jax.jit(lambda *x: Attention().apply({}, *x))
        difference = jnp.abs(run(*given).reshape(q.shape) - plain(*given)).max()
        calls = run.lower(*given).as_text().count("@tessera")
    print(f"differs from plain JAX by {difference:.1e}  calls of tessera in the program {calls}")
    try:
        Attention().apply({}, *given)
    except ModuleNotFoundError as error:
        print("removed:", error)


if __name__ == "__main__":
    main()
