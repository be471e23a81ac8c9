"""List of the configurations of a model that `edge-server analyze` tries (instances, batching and others), and their
text for config.pbtxt."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

AS_CONFIGURED = "as configured"

_THREAD_KEYS = {"onnxruntime": "intra_op_thread_count", "openvino": "INFERENCE_NUM_THREADS"}
"""Backend -> its parameter for the number of threads. ONNX Runtime counts per request, OpenVINO for all requests."""


@dataclass(frozen=True, slots=True)
class ServerCandidate:
    """Changes to the model's configuration; "" and 0 mean no change.

    `threads` is the number of threads per request. `batch` is the largest dynamic batch: 1 turns dynamic batching off,
    -1 means no change.
    """

    backend: str = ""
    precision: str = ""
    instances: int = 0
    threads: int = 0
    batch: int = -1

    @property
    def is_default(self) -> bool:
        return self == ServerCandidate()

    def __str__(self) -> str:
        """Return a description; tables and charts use it as the name."""
        parts = [self.backend, self.precision]
        parts.append(f"{self.instances} instance{'s' * (self.instances > 1)}" if self.instances else "")
        parts.append(f"{self.threads} thread{'s' * (self.threads > 1)}" if self.threads else "")
        parts.append("" if self.batch < 0 else "no batching" if self.batch == 1 else f"batches to {self.batch}")
        return ", ".join(part for part in parts if part) or AS_CONFIGURED


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Values to try for each setting. An empty sequence keeps the configured value."""

    backends: Sequence[str] = ()
    precisions: Sequence[str] = ()
    instances: Sequence[int] = ()
    threads: Sequence[int] = ()
    batches: Sequence[int] = ()

    def candidates(self, cores: int) -> list[ServerCandidate]:
        """Return the unchanged configuration, then all combinations with at most twice as many threads as cores."""
        found = [ServerCandidate()]
        for backend, precision, instances, threads, batch in itertools.product(
            self.backends or ("",), self.precisions or ("",), self.instances or (0,), self.threads or (0,),
            self.batches or (-1,),
        ):  # fmt: skip
            # A runtime without a thread setting gets no thread variants.
            used_threads = threads if not backend or backend in _THREAD_KEYS else 0
            if max(instances, 1) * used_threads <= 2 * cores:
                found.append(ServerCandidate(backend, precision, instances, used_threads, batch))
        return list(dict.fromkeys(found))


def why_no_bf16(backend: str, machine: str = platform.machine()) -> str:
    """Return why a backend cannot compute in bf16 on this CPU architecture, or "" if it may."""
    if backend == "onnxruntime" and machine != "aarch64":
        return "ONNX Runtime computes in bf16 on aarch64 only"
    return ""


def default_space(backend: str, filename: str, max_batch_size: int, cores: int, *, tries_bf16: bool) -> SearchSpace:
    """Return the search space for a model that `backend` serves from `filename`.

    ONNX Runtime and OpenVINO both open ONNX files. Only these two have threads and precision to vary.
    """
    has_keys = backend in _THREAD_KEYS
    backends: tuple[str, ...] = tuple(_THREAD_KEYS) if has_keys and filename.endswith(".onnx") else ()
    precisions = ("f32", "bf16") if tries_bf16 and has_keys else ()
    threads = sorted({1, cores}) if has_keys else ()
    batches = (1, max_batch_size) if max_batch_size > 1 else ()
    return SearchSpace(backends, precisions, sorted({1, cores}), threads, batches)


def apply_candidate(candidate: ServerCandidate, config: Any, backend: str) -> Any:
    """Return a copy of an inference.ModelConfig with the candidate's changes. `backend` is the model's backend."""
    changed = type(config)()
    changed.CopyFrom(config)
    if candidate.backend:
        changed.platform = ""
        changed.backend = candidate.backend
    if candidate.precision:
        changed.parameters["precision"].string_value = candidate.precision
    if candidate.threads:
        for key in _THREAD_KEYS.values():
            changed.parameters.pop(key, None)
        key = _THREAD_KEYS[candidate.backend or backend]
        count = candidate.threads * (max(candidate.instances, 1) if key == _THREAD_KEYS["openvino"] else 1)
        changed.parameters[key].string_value = str(count)
    if candidate.instances:
        if not changed.instance_group:
            changed.instance_group.add()
        for group in changed.instance_group:
            group.count = candidate.instances
    if candidate.batch == 1:
        changed.ClearField("dynamic_batching")
    elif candidate.batch > 1:
        changed.max_batch_size = candidate.batch
        changed.dynamic_batching.SetInParent()
        sizes = [size for size in changed.dynamic_batching.preferred_batch_size if size <= candidate.batch]
        del changed.dynamic_batching.preferred_batch_size[:]
        changed.dynamic_batching.preferred_batch_size.extend(sizes)
    return changed
