"""Free memory of every thread's arena goes back to the system. In processes of their own: the allocator's
settings are the process's."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's allocator")

MIB = 1 << 20

THREAD = """
import ctypes, threading
from edge_server.memory.malloc_settings import keep_big_blocks, read_resident_bytes, trim, trim_own_end
library = ctypes.CDLL(None)
library.malloc.argtypes, library.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
library.free.argtypes, library.free.restype = (ctypes.c_void_p,), None
library.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)

def use(count=40, size=1 << 20):
    blocks = [library.malloc(size) for _ in range(count)]
    for block in blocks:
        library.memset(block, 1, size)
    for block in blocks:
        library.free(block)

def live():
    use(1)
    before = read_resident_bytes()
    use()
    left.append(read_resident_bytes() - before)
    finish()
    left.append(read_resident_bytes() - before)

left = []
"""


def left_by_a_thread(preparation: str, finish: str) -> list[int]:
    """Return the MiB that a thread's 40 blocks of 1 MiB leave resident, when they were freed and after `finish`."""
    code = f"{THREAD}\n{preparation}\nfinish = {finish}\nthread = threading.Thread(target=live)\nthread.start()\n"
    code += "thread.join()\nprint(*left)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [round(int(number) / MIB) for number in done.stdout.split()]


def test_a_thread_keeps_its_big_blocks_until_it_gives_the_end_of_its_arena_back() -> None:
    kept, left = left_by_a_thread("keep_big_blocks()", "trim_own_end")
    assert kept >= 39
    assert left <= 2


def test_trim_gives_back_what_the_calling_thread_used() -> None:
    kept, left = left_by_a_thread("keep_big_blocks()", "trim")
    assert kept >= 39
    assert left <= 2


def test_malloc_trim_alone_leaves_the_end_of_a_threads_arena() -> None:
    """The reason for `trim_own_end`; it can go where this fails."""
    _, left = left_by_a_thread("keep_big_blocks()", "lambda: library.malloc_trim(0)")
    assert left >= 39


def test_big_blocks_are_kept_again_after_a_trim() -> None:
    kept, _ = left_by_a_thread("keep_big_blocks(); trim()", "trim")
    assert kept >= 39


def test_without_keeping_nothing_is_set() -> None:
    """glibc adapts its thresholds until one of them is set."""
    kept, left = left_by_a_thread("library.mallopt = None", "trim_own_end")
    assert kept == left
