"""Memory of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes() -> int:
    """Memory of this host that is free or can be freed; where the system does not say, all of it."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
