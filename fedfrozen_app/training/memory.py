"""Memory that is freed in one step and wanted again in the next stays with the process."""

import ctypes
import sys
from functools import cache

# of mallopt(3): parameters, and the largest threshold that glibc takes on 64 bits
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 32 * 1024**2
NEVER = 2**31 - 1


@cache
def keep_freed_memory() -> bool:
    """Let glibc keep what is freed; return whether this platform has such an allocator.

    Gradients, momentum and replies are as large as the model and are made anew for every client.
    By default their memory goes back to the system each time and comes again page by page,
    zeroed, which costs more than a step of SGD on a large model. What a process keeps so is no
    more than it has once needed at a time.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    kept = mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    return bool(kept and mallopt(M_TRIM_THRESHOLD, NEVER))
