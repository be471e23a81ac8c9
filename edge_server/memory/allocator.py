"""How the C library's allocator treats big messages.

With glibc's defaults every tensor above the mmap threshold is mapped for its message and unmapped after it, and each
message pays for its page faults anew: a 600 KB request spends several times longer in the kernel than in copying.
"""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger(__name__)

# Parameters of mallopt(3), from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

KEPT_BYTES = 64 * 1024 * 1024
"""Blocks up to this size come from the heap, and this much free memory at its top is kept before it is given back."""


def keep_big_blocks() -> bool:
    """Tell glibc to reuse big blocks rather than to map each anew. False where the C library has no mallopt.

    Costs at most KEPT_BYTES of resident memory after a peak. Called once, before threads start.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        log.debug("this C library has no mallopt; big messages cost page faults")
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    # glibc accepts an mmap threshold of at most 32 MiB on 64-bit machines (HEAP_MAX_SIZE / 2).
    return bool(mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES // 2) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))


def trim() -> None:
    """Give free memory back to the system: after a model was unloaded, or loaded, which takes several copies of it."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        log.debug("this C library has no malloc_trim")


def read_resident_bytes() -> int:
    """Return the resident set size of this process, from /proc/self/statm (pages); 0 where there is no /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0
