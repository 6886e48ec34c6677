# SPDX-License-Identifier: Apache-2.0
"""tessera inside programs that people already run: docs/integrations.md."""
