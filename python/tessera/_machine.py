# SPDX-License-Identifier: Apache-2.0
"""What the machine calls itself."""

import platform


def cpu_model() -> str:
    """Name of the CPU, as Linux gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith(("model name", "Model")):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
