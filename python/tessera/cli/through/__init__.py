# SPDX-License-Identifier: Apache-2.0
"""python -m tessera check --through NAME: a module for each front end, imported where it is asked for."""
