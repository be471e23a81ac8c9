"""Session of one instance of an OpenVINO model: runs batches, padded if required, on a compiled model that instances
share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from edge_server.backends.base import Array, Session, SessionInfo
from edge_server.backends.openvino.model_reader import dims
from edge_server.backends.runtime_errors import message_line, run_error
from edge_server.core.tensor import DType
from edge_server.record import record

Shapes: TypeAlias = "Mapping[str, tuple[tuple[int, ...], np.dtype[np.generic]]]"
"""Shapes and types of a run's inputs, by name."""


@record(frozen=True, slots=True)
class CompiledModel:
    """A compiled model, the positions of its inputs and outputs, and its precision and options.

    `readable_in_place` are inputs that a run may read in their owner's memory, see `OpenVinoSession`.
    """

    model: Any
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    bf16: frozenset[str]
    """Names of bfloat16 tensors, which are passed as bit patterns."""
    readable_in_place: frozenset[str]
    precision: str
    options: Mapping[str, str]


class OpenVinoSession(Session):
    """One infer request of a shared compiled model.

    The CPU's graph (2026.4) gives an output the memory of an input that reaches it unchanged, and a later run would
    write there, into an array that its owner has freed or shares. So such inputs are copied into the request's own
    memory. Others are read where they are.
    """

    def __init__(
        self,
        model: str,
        info: SessionInfo,
        compiled: CompiledModel,
        request: Any,
        padded_rows: int,
        give_back: Callable[[], None],
        failures: tuple[type[Exception], ...],
        make_tensor: Callable[..., Any],
    ) -> None:
        """`padded_rows`: rows to pad batches to, 0 for none. `give_back` releases the share in the compiled model.
        `failures` are OpenVINO's exception classes, `make_tensor` is its Tensor."""
        self.info = info
        self._failures = failures
        self._model = model
        self._request = request
        self.is_repeatable = not request.query_state()
        self._inputs = compiled.inputs
        self._outputs = compiled.outputs
        self._compiled = compiled.model
        self._last_good: Shapes = {}
        self._last: Shapes = {}
        """Of the last successful run, of a batch or in `_recover`."""
        self._padded_rows = padded_rows
        self._bf16 = compiled.bf16
        self._readable_in_place = compiled.readable_in_place if not padded_rows else frozenset[str]()
        in_place = {self._inputs[name] for name in self._readable_in_place}
        self._own = {index: request.get_input_tensor(index) for index in in_place}
        """The request's own memory of these inputs: after a run the request refers to no other."""
        self._make_tensor = make_tensor
        self._give_back = give_back

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        try:
            found = self._infer(inputs, outputs)
        except self._failures as error:
            said = message_line(error)
        else:
            self._last = self._last_good = {name: (array.shape, array.dtype) for name, array in inputs.items()}
            return found
        self._recover()
        accepted = {name: dims(self._compiled.inputs[index]) for name, index in self._inputs.items()}
        # Raised outside the handler: a chained traceback would keep the batch in memory.
        raise run_error(self._model, "openvino", said, inputs, accepted)

    def _recover(self) -> None:
        """Run zeros with other shapes than the last successful run, after a failed run.

        A run that fails because of its shapes leaves the CPU's graph (2026.4) partly set to them, while its nodes still
        have the shapes of the last successful run. The next run with those shapes would fail too, or give wrong
        results, until a run with other shapes succeeds.
        """
        enlarged = [self._enlarge(self._last_good, every=every) for every in (True, False)]
        for shapes in (*enlarged, self._last_good):
            if shapes == self._last:
                continue
            try:
                self._infer({name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}, ())
            except self._failures:
                continue
            self._last = shapes
            return

    def _enlarge(self, shapes: Shapes, *, every: bool) -> Shapes:
        """Return shapes that are larger by 1 in every dimension of any size, or in the first of them."""
        found = {}
        for name, (shape, dtype) in shapes.items():
            free = [place for place, size in enumerate(dims(self._compiled.inputs[self._inputs[name]])) if size == -1]
            chosen = free if every else free[:1]
            found[name] = tuple(size + (place in chosen) for place, size in enumerate(shape)), dtype
        return found

    def _infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        rows = 0
        borrowed = []
        for name, array in inputs.items():
            # OpenVINO takes no memory that is read-only.
            if name in self._readable_in_place and array.flags.carray:
                index = self._inputs[name]
                self._request.set_input_tensor(index, self._make_tensor(array, shared_memory=True))
                borrowed.append(index)
                continue
            shape = array.shape
            if self._padded_rows and len(array) < self._padded_rows:
                rows = len(array)
                shape = (self._padded_rows, *shape[1:])
            tensor = self._request.get_input_tensor(self._inputs[name])
            tensor.shape = shape
            memory = tensor.data.view(np.uint16) if name in self._bf16 else tensor.data
            if rows:
                memory[rows:] = 0
                memory = memory[:rows]
            np.copyto(memory, array, casting="no")
        # Results share the request's memory, which the next run overwrites. So they are copied.
        try:
            results = list(self._request.infer(share_outputs=True).values())
        finally:
            for index in borrowed:
                self._request.set_input_tensor(index, self._own[index])
        found = {
            name: np.array(results[self._outputs[name]][:rows] if rows else results[self._outputs[name]])
            for name in outputs
        }
        found.update({name: found[name].view(DType.BF16.numpy) for name in found.keys() & self._bf16})
        return found

    def close(self) -> None:
        self._request = self._compiled = None
        self._give_back()
