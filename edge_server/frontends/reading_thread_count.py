"""Number of threads that read the connections of a listener: one with Python's global interpreter lock (GIL), several
without."""

from __future__ import annotations

import sys

MAX_THREADS = 4
"""Without a lock each thread serves as many requests as a whole server with it, and models need processors too."""


def reading_thread_count() -> int:
    """Return the number for a listener that opens now.

    With an interpreter lock the threads would only take turns. Without one it is the number of usable cores, at most
    MAX_THREADS.
    """
    # Documented by Python, in spite of its name. Before 3.13 each Python has a lock, and no such function.
    is_gil_enabled = getattr(sys, "_is_gil_enabled", None)
    if is_gil_enabled is None or is_gil_enabled():
        return 1
    from edge_server.cgroup_limits import usable_cores

    return min(usable_cores(), MAX_THREADS)
