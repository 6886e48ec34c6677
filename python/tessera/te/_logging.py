# SPDX-License-Identifier: Apache-2.0
"""TE's log: NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=0|1|2 is warnings, the backend that runs, or why."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("DotProductAttention")
fused_logger = logging.getLogger("FusedAttnFunc")

# The dictionary in os.environ. torch.compile guards what it reads in a dictionary, but not os.environ:
# a compiled call follows the switches as an eager one does.
_environment = getattr(os.environ, "_data", os.environ)
_stored = next(iter(_environment), "")  # bytes, but for Windows


def switch(name: str, default: int) -> int:
    """An NVTE_* variable, read now."""
    text = _variable(name)
    if text and not text.isdecimal():
        raise ValueError(f"{name}={text!r}: must be a number; unset it for {default}")
    return int(text) if text else default


def _variable(name: str) -> str:
    if isinstance(_stored, bytes):
        key = name.encode()
        return _environment[key].decode() if key in _environment else ""
    return _environment[name] if name in _environment else ""


class AttentionLogging:
    """The handler of TE's logger, of which TE's users know these names."""
    _log_level = logging.WARNING
    _formatter = logging.Formatter("[%(levelname)-8s | %(name)-19s]: %(message)s")
    _stream_handler = logging.StreamHandler()
    _is_logging_setup = False
    fa_logger = logger

    @staticmethod
    def setup_logging():
        """Follows the switches as they are now. An application's own handlers win."""
        level = switch("NVTE_DEBUG", 0) * switch("NVTE_DEBUG_LEVEL", 0)
        levels = {0: logging.WARNING, 1: logging.INFO}
        AttentionLogging._log_level = levels.get(level, logging.DEBUG)
        AttentionLogging._stream_handler.setFormatter(AttentionLogging._formatter)
        for one in (logger, fused_logger):
            one.setLevel(AttentionLogging._log_level)
            if not one.hasHandlers():
                one.addHandler(AttentionLogging._stream_handler)
        AttentionLogging._is_logging_setup = True
