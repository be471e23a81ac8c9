"""Reader and writer of .npz files, without pickles, in which trials and engine builds exchange named tensors with their
child processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from edge_server.backends.base import Array

Tensors: TypeAlias = Mapping[str, Array]

_PLAIN, _LENGTHS, _BYTES = "plain", "lengths", "bytes"


def save_tensors(path: Path, sets: Sequence[Tensors]) -> None:
    """Write a sequence of named tensor sets. Raises OSError."""
    arrays: dict[str, Array] = {}
    for number, tensors in enumerate(sets):
        for name, array in tensors.items():
            if array.dtype == object:
                texts = [bytes(item) for item in array.flat]
                lengths = np.array([len(text) for text in texts], np.int64).reshape(array.shape)
                arrays[f"{number}/{_LENGTHS}/{name}"] = lengths
                arrays[f"{number}/{_BYTES}/{name}"] = np.frombuffer(b"".join(texts), np.uint8)
            else:
                arrays[f"{number}/{_PLAIN}/{name}"] = array
    with open(path, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def load_tensors(path: Path) -> list[dict[str, Array]]:
    """Read a file of `save_tensors`."""
    sets: dict[int, dict[str, Array]] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for key in arrays.files:
            number, kind, name = key.split("/", 2)
            tensors = sets.setdefault(int(number), {})
            if kind == _PLAIN:
                tensors[name] = arrays[key]
            elif kind == _LENGTHS:
                tensors[name] = _split_strings(arrays[key], arrays[f"{number}/{_BYTES}/{name}"].tobytes())
    return [sets[number] for number in sorted(sets)]


def _split_strings(lengths: Array, joined: bytes) -> Array:
    ends = np.cumsum(lengths.reshape(-1))
    found = np.empty(lengths.size, dtype=object)
    found[:] = [joined[end - length : end] for end, length in zip(ends, lengths.flat, strict=True)]
    shaped: Array = found.reshape(lengths.shape)
    return shaped
