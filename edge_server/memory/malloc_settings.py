"""Settings of glibc's malloc that make large messages cheap, and functions that return free memory to the system.

With glibc's defaults, every tensor above the mmap threshold is mapped for its message and unmapped after it. Each
message then pays for its page faults: a 600 KB request spends several times longer in the kernel than in copying.
"""

from __future__ import annotations

import ctypes
import logging
import threading

log = logging.getLogger(__name__)

# Parameters of mallopt(3), from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

KEPT_BYTES = 64 * 1024 * 1024
"""Blocks up to half this size come from the heap. Up to this much free memory is kept at its top."""


_BIG_FREE_BYTES = 128 * 1024
"""Above glibc's FASTBIN_CONSOLIDATION_THRESHOLD (malloc.c). Freeing a block of this size lets an arena trim its top."""

_lock = threading.Lock()
_kept_bytes = 0
"""Value set by `keep_big_blocks`; 0 before. Guarded by the lock."""


def keep_big_blocks() -> bool:
    """Make glibc reuse big blocks instead of mapping each one. Return False if the C library has no mallopt.

    Costs at most KEPT_BYTES of resident memory after a peak. Called once, before threads start.
    """
    global _kept_bytes
    try:
        mallopt = _library().mallopt
    except (OSError, AttributeError):
        log.debug("this C library has no mallopt; big messages cost page faults")
        return False
    # glibc accepts an mmap threshold of at most 32 MiB on 64-bit machines (HEAP_MAX_SIZE / 2).
    if not (mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES // 2) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)):
        return False
    with _lock:
        _kept_bytes = KEPT_BYTES
    return True


def trim() -> None:
    """Return free memory to the system after a model was unloaded, or loaded, which takes several copies of it.

    The free ends of other threads' arenas are not returned: see `trim_own_end`.
    """
    trim_own_end()
    try:
        _library().malloc_trim(0)
    except (OSError, AttributeError):
        log.debug("this C library has no malloc_trim")


def trim_own_end() -> None:
    """Return the free end of the calling thread's arena to the system, after the thread opened or closed a model.

    Each thread allocates from an arena. malloc_trim(3) returns free pages within all arenas, but the free end only of
    the main arena (`mtrim` in glibc's malloc.c). The end of another arena is returned when a big block is freed in it
    while the end is above the trim threshold. Without this, opening a model of 18 MB left 16 MB behind. Does nothing
    before `keep_big_blocks`: the threshold is glibc's own until then.
    """
    with _lock:
        if not _kept_bytes:
            return
        library = _library()
        # Another thread that frees a big block at this moment also returns its arena's end, which is harmless.
        library.mallopt(_M_TRIM_THRESHOLD, 0)
        library.free(library.malloc(_BIG_FREE_BYTES))
        library.mallopt(_M_TRIM_THRESHOLD, _kept_bytes)


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    library.malloc.argtypes, library.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    library.free.argtypes, library.free.restype = (ctypes.c_void_p,), None
    return library


def read_resident_bytes() -> int:
    """Return the resident set size of this process, from /proc/self/statm (pages of 4096 bytes); 0 without /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0
