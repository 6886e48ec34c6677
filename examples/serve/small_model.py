# SPDX-License-Identifier: Apache-2.0
"""A decoder to serve where none is at hand: transformers' Llama with bytes for tokens, 0.4 million
parameters, trained for half a minute on the documents of this repository. It has learnt which letters
follow each other, and nothing of what they mean."""
from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 2048  # positions


class Bytes:
    """A tokenizer: a token is a byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def text() -> str:
    return "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))


def config() -> LlamaConfig:
    return LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=2,
                       num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=LONGEST,
                       tie_word_embeddings=True, bos_token_id=None, eos_token_id=None)


def load(attention: str, steps: int, folder: Path, progress=lambda step, loss: None) -> LlamaForCausalLM:
    """The model after `steps` steps of training, from `folder` if it was trained before. 0 steps are
    random weights."""
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config(), attn_implementation=attention)
    if steps:
        key = hashlib.sha256(f"{model.config}{steps}{text()}".encode()).hexdigest()[:12]
        weights = folder / f"bytes-{key}.pt"
        if not weights.exists():
            _train(model, steps, progress)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), weights)
        model.load_state_dict(torch.load(weights, weights_only=True))
    return model.eval()


def _train(model, steps: int, progress, context: int = 128, batch: int = 8):
    served, data = model.config._attn_implementation, torch.tensor(list(text().encode()))
    model.set_attn_implementation("sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
        starts = torch.randint(len(data) - context, (batch,))
        rows = torch.stack([data[start:start + context] for start in starts])
        loss = model(rows, labels=rows, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress(step + 1, loss.item())
    model.set_attn_implementation(served)
