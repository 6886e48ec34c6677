# SPDX-License-Identifier: Apache-2.0
"""The command line of `python -m tessera`: one module for each command."""
