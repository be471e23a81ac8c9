"""Fuzzes one reader in this process: `fuzz_reader.py NAME LIBFUZZER_ARGUMENT...`. `__main__.py` starts it."""

from __future__ import annotations

import importlib
import resource
import sys
import tempfile
from pathlib import Path

import atheris
from reader_list import PACKAGES, READERS

_MEMORY_BYTES = 1 << 30
"""Address space that the reader may use beside what its modules use once they are imported."""


def main() -> None:
    name, arguments = sys.argv[1], sys.argv[2:]
    with atheris.instrument_imports(include=list(PACKAGES)):
        reader = importlib.import_module(f"readers.{name}")
    for seed in reader.seeds():
        reader.check(seed)  # imports and caches what comes late
    with tempfile.NamedTemporaryFile("w") as words:
        words.writelines(_dictionary_line(word) for word in getattr(reader, "WORDS", ()))
        words.flush()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, resource.RLIM_INFINITY))
        settings = [f"-max_len={READERS[name]}", *([f"-dict={words.name}"] if words.tell() else [])]
        atheris.Setup([sys.argv[0], *settings, *arguments], reader.check)
        atheris.Fuzz()


def _dictionary_line(word: str) -> str:
    """Return a line of libFuzzer's dictionary format."""
    return '"' + "".join(f"\\x{octet:02x}" for octet in word.encode()) + '"\n'


main()
