# SPDX-License-Identifier: Apache-2.0
"""FP8: what is rounded, by whose scale, and what is remembered of it."""
