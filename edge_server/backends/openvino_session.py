"""OpenVINO session: one infer request, tensors over the caller's memory, batches padded to a fixed size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from edge_server.backends.base import Array, Session, SessionInfo
from edge_server.backends.openvino_tensor_info import dims
from edge_server.backends.runtime_library import words, writable
from edge_server.core.tensor import DType
from edge_server.errors import BackendError

Shapes: TypeAlias = "Mapping[str, tuple[tuple[int, ...], np.dtype[np.generic]]]"
"""Of a run's inputs, and their types, by name."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled model with what is known about it."""

    model: Any
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    bf16: frozenset[str]
    """Tensors whose elements numpy lacks, and which travel as bit patterns."""
    precision: str
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class OpenVinoLibrary:
    """OpenVINO's Python module, and all exception classes that it raises."""

    ov: Any
    failures: tuple[type[Exception], ...]

    def tensor(self, array: Array, is_bf16: bool) -> Any:
        """Return an OpenVINO tensor over the array's own memory."""
        if is_bf16:
            return self.ov.Tensor(array, self.ov.Shape(array.shape), self.ov.Type.bf16)
        return self.ov.Tensor(array, shared_memory=True)


class OpenVinoSession(Session):
    """One infer request of a shared compiled model."""

    def __init__(
        self,
        library: OpenVinoLibrary,
        model: str,
        info: SessionInfo,
        compiled: Compiled,
        request: Any,
        padded_rows: int,
        give_back: Callable[[], None],
    ) -> None:
        """`padded_rows`: rows to fill batches up to, 0 for none. `give_back` ends the share of the compiled model."""
        self.info = info
        self._library = library
        self._failures = library.failures
        self._model = model
        self._request = request
        self._inputs = compiled.inputs
        self._outputs = compiled.outputs
        self._compiled = compiled.model
        self._worked: Shapes = {}
        self._last: Shapes = {}
        """Of the last run that went well, a client's or one of `_bring_back`."""
        self._padded_rows = padded_rows
        self._bf16 = compiled.bf16
        self._give_back = give_back

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        try:
            found = self._infer(inputs, outputs)
        except self._failures as error:
            said = words(error)
        else:
            self._last = self._worked = {name: (array.shape, array.dtype) for name, array in inputs.items()}
            return found
        self._bring_back()
        # Raised outside the handler: the runtime's exception would keep its frames, and the batch with them, alive.
        raise BackendError(f"model '{self._model}': openvino failed: {said}")

    def _bring_back(self) -> None:
        """Run zeros of shapes other than the last, after a run that failed.

        A run that failed for its shapes leaves the CPU's graph (2026.4) half-way to these, while its nodes think that
        they have those of the last run that went well: the next of the very same would fail too, or answer wrongly,
        until one of others goes well.
        """
        grown = [self._grown(self._worked, every=every) for every in (True, False)]
        for shapes in (*grown, self._worked):
            if shapes == self._last:
                continue
            try:
                self._infer({name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}, ())
            except self._failures:
                continue
            self._last = shapes
            return

    def _grown(self, shapes: Shapes, *, every: bool) -> Shapes:
        """Return shapes one larger along every dimension that may have any size, or along the first of them."""
        found = {}
        for name, (shape, dtype) in shapes.items():
            free = [place for place, size in enumerate(dims(self._compiled.inputs[self._inputs[name]])) if size == -1]
            chosen = free if every else free[:1]
            found[name] = tuple(size + (place in chosen) for place, size in enumerate(shape)), dtype
        return found

    def _infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        rows = 0
        held = []
        for name, given in inputs.items():
            array = given
            if self._padded_rows and len(array) < self._padded_rows:
                rows, array = len(array), _padded(array, self._padded_rows)
            ready = writable(array)
            tensor = self._library.tensor(ready, name in self._bf16)
            held.append((array, ready, tensor))
            self._request.set_input_tensor(self._inputs[name], tensor)
        # Results share the request's own memory, which the next run overwrites: hand out copies.
        results = list(self._request.infer(share_outputs=True).values())
        found = {
            name: np.array(results[self._outputs[name]][:rows] if rows else results[self._outputs[name]])
            for name in outputs
        }
        found.update({name: found[name].view(DType.BF16.numpy) for name in found.keys() & self._bf16})
        return found

    def close(self) -> None:
        self._request = self._compiled = None
        self._give_back()


def _padded(array: Array, rows: int) -> Array:
    padded = np.zeros((rows, *array.shape[1:]), dtype=array.dtype)
    padded[: len(array)] = array
    return padded
