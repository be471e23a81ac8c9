"""Computation of the cache key of a request: equal requests have equal keys.

A key is a SHA-256 digest of everything that decides the answer: the model (see `identity`), each input's name, type,
shape and bytes, and the requested outputs. SHA-256 is the fastest hash of the standard library on processors with
instructions for it, as Jetsons and newer x86 have. As in Triton, the request's id, priority and timeouts are left out.
Triton leaves out the request's parameters too. Here they count for models that see them: models that get whole requests
(Python models) and ensembles.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

from edge_server.core.model_spec import ModelFile, ModelSpec
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType
from edge_server.errors import StorageFault

KEY_BYTES = 32

ReadableBytes: TypeAlias = bytes | memoryview

_CHUNK_BYTES = 1 << 20
_LENGTH = struct.Struct("<Q")


class KeyDigest(Protocol):
    def update(self, data: ReadableBytes, /) -> None: ...


class RequestKeys:
    """Makes the keys of one version's requests. `identity` is unique for the version. Thread-safe."""

    def __init__(self, identity: bytes, spec: ModelSpec, *, sees_parameters: bool) -> None:
        self._base = hashlib.sha256(identity)
        self._input_names = tuple(item.name for item in spec.inputs)
        self._output_names = tuple(item.name for item in spec.outputs)
        self._sees_parameters = sees_parameters

    def key(self, request: Request) -> bytes:
        """Return the key of a valid request. Reads every byte of its inputs."""
        inputs = request.inputs
        given = [inputs[name] for name in self._input_names if name in inputs]
        wanted: tuple[str, ...] = self._output_names
        if request.outputs:
            wanted = tuple(name for name in wanted if name in request.outputs)
        parameters = sorted(request.parameters.items()) if self._sees_parameters else ()
        head = repr(([(item.name, item.dtype.value, item.array.shape) for item in given], wanted, parameters))
        digest = self._base.copy()
        _update(digest, head.encode("utf-8", "surrogatepass"))
        # Shape and type, which are in the head, fix the number of bytes; elements of BYTES carry their length.
        for item in given:
            if item.dtype is DType.BYTES:
                for element in item.array.reshape(-1).tolist():
                    _update(digest, bytes(element))
            else:
                flat = np.ascontiguousarray(item.array).reshape(-1)
                digest.update(flat.view(np.uint8).data)
        return digest.digest()


def input_bytes(request: Request) -> int:
    """Return the approximate number of bytes that the key of a request is made from."""
    return sum(item.nbytes for item in request.inputs.values())


def identity(*parts: object) -> bytes:
    """Return a key that is unique for a version, from parts with a complete `repr`."""
    return repr(parts).encode("utf-8", "surrogatepass")


def content_digest(file: ModelFile, spec: ModelSpec, settings: Mapping[str, str]) -> str:
    """Return a digest of the files, the configuration and the backend's settings of a version.

    It is the same on another machine, and after a restart. Raises StorageFault if a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    _update(digest, repr((spec.config_json, sorted(settings.items()))).encode("utf-8", "surrogatepass"))
    try:
        for path in _files_of(file):
            _update(digest, os.fsencode(path.relative_to(file.model_dir)))
            with open(path, "rb") as stream:
                digest.update(_LENGTH.pack(os.fstat(stream.fileno()).st_size))
                while chunk := stream.read(_CHUNK_BYTES):
                    digest.update(chunk)
    except OSError as error:
        raise StorageFault(f"model '{spec.name}': its files cannot be read for the response cache: {error}") from error
    return digest.hexdigest()


def _files_of(file: ModelFile) -> Iterator[Path]:
    """Yield the model's files in a fixed order, without those of other versions."""
    for folder, folders, names in os.walk(file.model_dir, followlinks=True):
        if Path(folder) == file.model_dir:
            folders[:] = [name for name in folders if not name.isdecimal() or int(name) == file.version]
        # Python's compiled files say nothing about the model.
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        yield from (Path(folder, name) for name in sorted(names))


def _update(digest: KeyDigest, text: bytes) -> None:
    digest.update(_LENGTH.pack(len(text)))
    digest.update(text)
