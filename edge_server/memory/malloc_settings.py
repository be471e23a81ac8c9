"""glibc malloc settings for large messages, and functions that return free memory to the system.

With glibc's defaults every tensor above the mmap threshold is mapped for its message and unmapped after it, and each
message pays for its page faults anew: a 600 KB request spends several times longer in the kernel than in copying.
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
"""Blocks up to this size come from the heap, and this much free memory at its top is kept before it is given back."""


_BIG_FREE_BYTES = 128 * 1024
"""Above the size, of glibc's malloc.c (FASTBIN_CONSOLIDATION_THRESHOLD), whose release has an arena look at its top."""

_lock = threading.Lock()
_kept_bytes = 0
"""What `keep_big_blocks` set; 0 before. Under the lock."""


def keep_big_blocks() -> bool:
    """Tell glibc to reuse big blocks rather than to map each anew. False where the C library has no mallopt.

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
    """Give free memory back to the system: after a model was unloaded, or loaded, which takes several copies of it.

    Of the arenas of other threads the free ends stay as they are: see `trim_own_end`.
    """
    trim_own_end()
    try:
        _library().malloc_trim(0)
    except (OSError, AttributeError):
        log.debug("this C library has no malloc_trim")


def trim_own_end() -> None:
    """Give back the free end of the arena that the calling thread allocates from: after it opened or closed a model.

    Each thread allocates from an arena, and malloc_trim(3) gives back free pages within all of them, but of the main
    arena alone the free end (`mtrim` in glibc's malloc.c); the others' goes when a big block is released in them while
    their end is above the trim threshold. Without this, opening a model of 18 MB left 16 MB behind. Does nothing
    before `keep_big_blocks`: then the threshold is glibc's own.
    """
    with _lock:
        if not _kept_bytes:
            return
        library = _library()
        # Who releases a big block on another thread just now gives its end back as well, which is no harm.
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
    """Return the resident set size of this process, from /proc/self/statm (pages); 0 where there is no /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0
