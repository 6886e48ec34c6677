# SPDX-License-Identifier: Apache-2.0
"""flash_attn.layers, of which rotary is here."""
