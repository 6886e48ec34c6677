# SPDX-License-Identifier: Apache-2.0
"""tessera as the attention of models that axolotl trains, by two lines of its configuration:

    attn_implementation: sdpa                  # eager: for models that transformers has no SDPA for
    plugins: [tessera.hf.axolotl.Plugin]

axolotl takes the names of attentions that it knows, and decides by the name whether packed samples are told apart: with
sdpa and eager it leaves out the mask, so that position_ids tell. With the name of a hub kernel it keeps a mask in which
the samples of a row see each other. So the plugin lets axolotl build the model, and then gives it tessera's attention.
"""

from __future__ import annotations

from axolotl.integrations.base import BasePlugin
from transformers import PreTrainedModel

from . import _models


class Plugin(BasePlugin):
    """What `plugins:` names."""

    def post_model_build(self, cfg, model):
        """axolotl calls this before adapters are added. ValueError: a configuration with another attention;
        tessera.Refused: a model that computes attention by itself."""
        if cfg.attn_implementation not in ("sdpa", "eager"):
            raise ValueError(f"tessera.hf.axolotl: attn_implementation={cfg.attn_implementation}: must be sdpa or "
                             "eager, with which axolotl tells packed samples apart by position_ids alone")
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                _models.check(part)  # where transformers would only log that it leaves the part as it is
        model.set_attn_implementation("tessera")
