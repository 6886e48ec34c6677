# SPDX-License-Identifier: Apache-2.0
"""Which backend runs a call, and what was decided about its like."""
