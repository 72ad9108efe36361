"""How this process's memory is given back to the system, which decides what a training step on a CPU costs.

glibc returns large blocks to the system whenever they are freed, and a step frees and takes the same ones again and
again: each time the system clears them page by page. With few rows a step that was measured as a fifth of its time.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_NEVER_TRIM, _LARGEST = 2**31 - 1, 2**30


def keep_freed_memory() -> bool:
    """Keep what is freed for what comes next, for the rest of the process: its size stays at its peak. Says whether the
    C library can (glibc)."""
    if not sys.platform.startswith("linux"):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    return all(
        set_option(option, value) == 1
        for option, value in ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _NEVER_TRIM))
    )
