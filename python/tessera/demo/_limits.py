# SPDX-License-Identifier: Apache-2.0
"""What the command line and the run agree on; without NumPy, which help does without."""

SHORTEST = 1024  # tokens of the scaling run
