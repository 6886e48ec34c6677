# SPDX-License-Identifier: Apache-2.0
# example (torch diffusers): a door: a Flux pipeline of diffusers makes its image on tessera
"""Make an image with a small Flux pipeline of diffusers (random weights, no download) on diffusers' own attention, on
tessera among its backends, and on its own again: the images are the same, and a profile says how often tessera ran.

    ./dev example doors/diffusers_flux                  (seconds on a CPU)
    ./dev example doors/diffusers_flux --device cuda
"""
import argparse

import diffusers
import numpy as np
import torch

from tessera.doors import diffusers_backend


def pipeline(device):
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8))
    vae = diffusers.AutoencoderKL(
        sample_size=32, block_out_channels=(4,), latent_channels=1, norm_num_groups=1, use_quant_conv=False,
        use_post_quant_conv=False, shift_factor=0.06, scaling_factor=0.35)
    made = diffusers.FluxPipeline(diffusers.FlowMatchEulerDiscreteScheduler(), vae, None, None, None, None, transformer)
    made.set_progress_bar_config(disable=True)
    return made.to(device)


def image(made):
    """Its pixels, and the calls of tessera's operators."""
    noise = torch.Generator().manual_seed(1)
    prompt, pooled = (torch.randn(shape, generator=noise).to(made.device) for shape in ((1, 6, 32), (1, 32)))
    with torch.profiler.profile() as profile:
        pixels = made(prompt_embeds=prompt, pooled_prompt_embeds=pooled, height=8, width=8, num_inference_steps=3,
                      generator=noise, output_type="np").images[0]
    return pixels, sum(event.count for event in profile.key_averages() if event.key.startswith("tessera::"))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made = pipeline(parser.parse_args(argv).device)
    native, calls = image(made)
    print(f"native        mean {native.mean():.6f}  calls of tessera {calls}")
    handle = diffusers_backend.register()
    made.transformer.set_attention_backend("tessera")
    ours, calls = image(made)
    print(f"tessera       differs by {np.abs(ours - native).max():.1e}  calls of tessera {calls}")
    made.transformer.reset_attention_backend()
    handle.remove()
    again, calls = image(made)
    print(f"native again  differs by {np.abs(again - native).max():.1e}  calls of tessera {calls}")


if __name__ == "__main__":
    main()
