# SPDX-License-Identifier: Apache-2.0
"""What query, key and value are stored as, and masks as tensors."""
