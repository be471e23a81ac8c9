"""Computation of the name under which an engine is stored: a hash of everything that the engine depends on. Engines
with the same name are interchangeable."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_server.backends.cuda.cuda_driver import CudaDevice
from edge_server.file_stamp import file_stamp
from edge_server.plugins.tensorrt.engine_order import EngineOrder

_CHUNK = 1 << 20

_DIFFERENCES = {
    "model_sha256": "the model's file changed",
    "library": "it was built by another library",
    "library_version": "TensorRT's version changed",
    "device": "it was built for another GPU",
    "capability": "it was built for another compute capability",
    "l4t": "the Jetson's system release changed",
    "tpc_mask": "the power mode switches other parts of the GPU on",
    "precision": "another precision is asked for",
    "profiles": "other profiles are asked for",
    "options": "other options are asked for",
    "plugins_sha256": "its plugins changed",
}
"""Field -> text for people about its difference."""


@dataclass(frozen=True, slots=True)
class EngineKey:
    """`fields` are JSON values. Keys are equal when their digests are."""

    fields: Mapping[str, object]
    digest: str

    def differences(self, other: Mapping[str, object]) -> tuple[str, ...]:
        """Return the fields in which another engine's key differs."""
        return tuple(name for name in _DIFFERENCES if self.fields.get(name) != other.get(name))


def key_of(order: EngineOrder, device: CudaDevice, gpu: GpuIdentity, hashes: FileHashes) -> EngineKey:
    """Return an order's key on a machine. Reads the model's files. Raises OSError."""
    plugins = [Path(text) for text in order.options.get("trt_extra_plugin_lib_paths", "").split(";") if text]
    fields: dict[str, object] = {
        **order.recipe(),
        "model_sha256": hashes.of_model(order.path),
        "device": device.name,
        "capability": device.capability_text,
        "l4t": gpu.l4t,
        "tpc_mask": gpu.tpc_mask,
        "plugins_sha256": [hashes.of_file(path) for path in plugins],
    }
    # In the form that JSON returns: tuples are lists.
    fields = json.loads(json.dumps(fields))
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return EngineKey(fields, hashlib.sha256(text.encode()).hexdigest()[:32])


def describe_differences(differences: tuple[str, ...]) -> str:
    """Return the differing fields as text."""
    return "; ".join(_DIFFERENCES[name] for name in differences)


class FileHashes:
    """SHA-256 of files, kept while a file does not change: models of gigabytes are read once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Path, tuple[tuple[int, ...], str]] = {}

    def of_file(self, path: Path) -> str:
        """Return a file's hash. Raises OSError."""
        mark = file_stamp(os.stat(path))
        with self._lock:
            known = self._known.get(path)
        if known is not None and known[0] == mark:
            return known[1]
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        with self._lock:
            self._known[path] = mark, digest.hexdigest()
        return digest.hexdigest()

    def of_model(self, path: Path) -> str:
        """Return the hash of an ONNX file and of the files beside it that it names, which may have its weights."""
        beside = [other for other in sorted(path.parent.rglob("*")) if other != path and other.is_file()]
        named = _named_in(path, beside) if beside else []
        if not named:
            return self.of_file(path)
        parts = [self.of_file(path), *(f"{other.relative_to(path.parent)}:{self.of_file(other)}" for other in named)]
        return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _named_in(path: Path, others: list[Path]) -> list[Path]:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return [
            other
            for other in others
            if view.find(other.relative_to(path.parent).as_posix().encode("utf-8", "surrogateescape")) >= 0
        ]


_RELEASE = re.compile(r"#\s*R(\d+)\s*\(release\),\s*REVISION:\s*([\d.]+)")
_MODE = re.compile(r"pmode:\s*0*(\d+)")
_MODEL = re.compile(r"<\s*POWER_MODEL\b[^>]*\bID=(\d+)")
_MASK = re.compile(r"^\s*TPC_POWER_GATING\s+TPC_PG_MASK\s+(\S+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """`l4t`: "36.4.3", "" if it is no Jetson. `tpc_mask`: the GPU's processors that the power mode has switched off, as
    in nvpmodel's configuration; "" if it switches none off or does not say."""

    l4t: str = ""
    tpc_mask: str = ""


def read_gpu_identity(root: Path = Path("/")) -> GpuIdentity:
    """Read the files of NVIDIA's system below `root`. A file that cannot be read counts as absent."""
    release = _RELEASE.search(_text(root / "etc/nv_tegra_release"))
    if release is None:
        return GpuIdentity()
    mode = _MODE.search(_text(root / "var/lib/nvpmodel/status"))
    return GpuIdentity(
        f"{release[1]}.{release[2]}", _mask_of(_text(root / "etc/nvpmodel.conf"), mode[1] if mode else "")
    )


def _mask_of(configuration: str, mode: str) -> str:
    """Return the mask in the section of a power mode."""
    current = ""
    for line in configuration.splitlines():
        model = _MODEL.search(line)
        if model is not None:
            current = model[1]
        mask = _MASK.match(line)
        if mask is not None and mode and current == mode:
            return mask[1]
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
