"""Batching of tensors: joins the inputs of several requests into one batch, and splits the outputs per request."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from edge_server.core.device_tensor import DeviceArray, DevicePiece, DeviceTensor, join_rows
from edge_server.core.model_spec import ModelSpec, OutputSpec
from edge_server.core.ragged_batch import join_flat, make_batch_input, ragged_output_shape, split_by_shapes
from edge_server.core.request_response import Request
from edge_server.core.shape_tensors import (
    batched_shape_inputs,
    batched_shape_outputs,
    prepend_batch_size,
    repeat_values_per_row,
)
from edge_server.core.tensor import DType, Tensor, fits
from edge_server.errors import BackendError, WrongOutput

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[np.generic]"

_SHOWN_VALUES = 16
"""Most values of a shape tensor that an error message shows."""


class BatchPlan:
    """Gathers inputs into batches and scatters outputs to requests. Made once per version; only `output_notes` grows.

    `on_note` gets each new sentence of `output_notes`.
    """

    def __init__(self, spec: ModelSpec, on_note: Callable[[str], object] = lambda note: None) -> None:
        self.spec = spec
        self._on_note = on_note
        self.output_notes: dict[str, str] = {}
        """By output whose shape or type differed from the declared one: a sentence about the first time."""
        self._output_specs = {item.name: item for item in spec.outputs}
        self._output_names = tuple(item.name for item in spec.outputs)
        self._has_batch_dim = spec.max_batch_size > 0
        self._plain_outputs = {
            item.name: (
                item.dtype,
                item.dtype.numpy,
                None if item.reshape is not None or item.is_shape_tensor else item.dims,
            )
            for item in spec.outputs
        }
        """Per output: its type, its numpy type, and the dims of an array that needs no reshaping (else None)."""
        self._ragged = frozenset(item.name for item in spec.inputs if item.allow_ragged_batch and self._has_batch_dim)
        self._shape_inputs = batched_shape_inputs(spec)
        self._shape_outputs = batched_shape_outputs(spec)
        self._reshaped_inputs = {
            item.name: (item.dims, item.reshape)
            for item in spec.inputs
            if item.reshape is not None and item.name not in self._ragged | self._shape_inputs
        }
        self._cut_by = {name: item.sources[0] for item in spec.batch_outputs for name in item.target_names}
        self._only_joins_items = not self._ragged and not spec.batch_inputs and not self._shape_inputs
        self._passes_inputs = self._only_joins_items and not self._reshaped_inputs
        """Whether the arrays of a single request are the model's inputs without change."""
        self._may_leave_out = any(item.is_optional for item in spec.inputs)

    def gather(self, requests: Sequence[Request]) -> dict[str, Array]:
        """Return the batch's inputs: the same arrays for a single request, else copies joined along the batch
        dimension."""
        first = requests[0].inputs
        if not self._only_joins_items:
            batch = self._gather_with_batch_info(requests)
        elif len(requests) == 1:
            batch = {name: tensor.array for name, tensor in first.items()}
        else:
            batch = {name: np.concatenate([request.inputs[name].array for request in requests]) for name in first}
        for name in self._reshaped_inputs.keys() & batch.keys():
            batch[name] = self._reshape(batch[name], *self._reshaped_inputs[name])
        return batch

    def uses_device(self, requests: Sequence[Request]) -> bool:
        """Return whether a request has inputs, or wants outputs, in GPU memory."""
        return any(
            request.targets is not None or any(isinstance(tensor, DeviceTensor) for tensor in request.inputs.values())
            for request in requests
        )

    def gather_on_device(self, requests: Sequence[Request]) -> Mapping[str, Array | DeviceArray]:
        """Return the inputs as `gather` does, but leave inputs that are on a GPU there.

        Models with ragged inputs, batch inputs or shape tensors get all inputs in host memory.
        """
        if not self._only_joins_items:
            return self.gather(requests)
        batch = {name: join_rows([request.inputs[name] for request in requests]) for name in requests[0].inputs}
        for name in self._reshaped_inputs.keys() & batch.keys():
            # Both kinds of array have `shape` and `reshape`.
            batch[name] = self._reshape(batch[name], *self._reshaped_inputs[name])  # type: ignore[arg-type]
        return batch

    def targets(self, requests: Sequence[Request]) -> Mapping[str, DevicePiece]:
        """Return the GPU memory to which the runtime writes outputs directly, by output name.

        Only a single request has such targets. A cached model has none: the cache may store the response after the
        memory was released. Shape tensors have none either: the host makes their rows.
        """
        if len(requests) > 1 or self._cut_by or self.spec.is_cached:
            return {}
        if self._shape_outputs:
            targets = requests[0].targets or {}
            return {name: piece for name, piece in targets.items() if name not in self._shape_outputs}
        return requests[0].targets or {}

    def _gather_with_batch_info(self, requests: Sequence[Request]) -> dict[str, Array]:
        """Return the batch's inputs: ragged inputs flat, shape tensors with the batch size before their values, and
        the batch inputs."""
        batch: dict[str, Array] = {}
        for name in requests[0].inputs:
            if name in self._shape_inputs:
                batch[name] = prepend_batch_size(requests[0].inputs[name].array, self._count_items(requests))
                continue
            arrays = [request.inputs[name].array for request in requests]
            if name in self._ragged:
                batch[name] = join_flat(arrays)
            else:
                batch[name] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        for item in self.spec.batch_inputs:
            made = make_batch_input(item.kind, item.dtype, self._shapes(requests, item.sources[0]))
            batch.update(dict.fromkeys(item.target_names, made))
        return batch

    def _count_items(self, requests: Sequence[Request]) -> int:
        """Return the number of items of all requests. A request whose inputs are all shape tensors has one item."""
        name = next((name for name in requests[0].inputs if name not in self._shape_inputs), None)
        if name is None:
            return len(requests)
        return sum(request.inputs[name].shape[0] for request in requests)

    @staticmethod
    def _shapes(requests: Sequence[Request], name: str) -> list[tuple[int, ...]]:
        return [request.inputs[name].array.shape for request in requests]

    def gather_one(self, request: Request) -> dict[str, Array]:
        """Return the inputs as `gather` does, for a single request."""
        if not self._passes_inputs:
            return self.gather([request])
        return {name: tensor.array for name, tensor in request.inputs.items()}

    def inputs_of(self, request: Request) -> dict[str, Array]:
        """Return the inputs of one request for a RequestSession, reshaped according to the configuration.

        The model gets the request, not a batch: ragged inputs keep the shape that the client sent, with the batch
        dimension. There are no batch inputs, and shape tensors stay as the client sent them.
        """
        inputs = {name: tensor.array for name, tensor in request.inputs.items()}
        for name in self._reshaped_inputs.keys() & inputs.keys():
            inputs[name] = self._reshape(inputs[name], *self._reshaped_inputs[name])
        return inputs

    def output_names_of(self, request: Request) -> Sequence[str]:
        """Return the outputs as `output_names` does, for a single request."""
        return self.output_names([request]) if request.outputs else self._output_names

    def output_names(self, requests: Sequence[Request]) -> Sequence[str]:
        """Return the outputs to compute, in model order: all, or the union of the requested outputs."""
        if not all(request.outputs for request in requests):
            return self._output_names
        union = {name for request in requests for name in request.outputs}
        return [name for name in self._output_names if name in union]

    def scatter(
        self, outputs: Mapping[str, Array], requests: Sequence[Request], item_counts: Sequence[int]
    ) -> list[tuple[Tensor, ...]]:
        """Return each request's outputs as views of the batch's.

        Raises BackendError if an output is missing or does not match the configuration's name, type or shape. A model
        with optional inputs may leave outputs out.
        """
        if self._cut_by:
            return self._scatter_ragged(outputs, requests, item_counts)
        total = sum(item_counts)
        whole = {name: self._checked(name, array, total) for name, array in outputs.items()}
        if len(whole) < len(self._output_names) and not self._may_leave_out:
            self._check_complete(whole, requests)
        if len(requests) == 1:
            return [self._pick(whole, requests[0], None)]
        outputs_by_request = []
        start = 0
        for request, count in zip(requests, item_counts, strict=True):
            outputs_by_request.append(self._pick(whole, request, slice(start, start + count)))
            start += count
        return outputs_by_request

    def scatter_one(
        self, outputs: Mapping[str, Array], request: Request, item_count: int, output_names: Sequence[str] | None = None
    ) -> tuple[Tensor, ...]:
        """Return the outputs as `scatter` does, for a single request. `output_names` is `output_names_of(request)`, if
        known."""
        if output_names is None:
            output_names = self.output_names_of(request)
        if self._cut_by or len(outputs) != len(output_names):
            return self.scatter(outputs, [request], [item_count])[0]
        tensors = []
        for name in output_names:
            array = outputs.get(name)
            if array is None:
                return self.scatter(outputs, [request], [item_count])[0]
            dtype, element, dims = self._plain_outputs[name]
            shape = array.shape
            if (
                array.dtype is not element
                or dims is None
                or shape != ((item_count, *dims) if self._has_batch_dim else dims)
            ):
                # Variable sizes, a reshaped output, or an output that does not match: use the full check.
                try:
                    array = self._checked(name, array, item_count)
                except BackendError:
                    # Of several faults, report the same one as for a batch.
                    return self.scatter(outputs, [request], [item_count])[0]
            tensors.append(Tensor(name, dtype, array))
        return tuple(tensors)

    def _scatter_ragged(
        self, outputs: Mapping[str, Array], requests: Sequence[Request], item_counts: Sequence[int]
    ) -> list[tuple[Tensor, ...]]:
        """Return the outputs as `scatter` does; batch outputs are split by the shapes of their source inputs."""
        ends = np.cumsum(item_counts)
        parts: dict[str, list[Array]] = {}
        for name, array in outputs.items():
            if name in self._cut_by:
                parts[name] = self._split_batch_output(name, array, requests)
            else:
                parts[name] = np.split(self._checked(name, array, int(ends[-1])), ends[:-1])
        if not self._may_leave_out:
            self._check_complete(parts, requests)
        return [
            self._pick({name: found[index] for name, found in parts.items()}, request, None)
            for index, request in enumerate(requests)
        ]

    def _split_batch_output(self, name: str, array: Array, requests: Sequence[Request]) -> list[Array]:
        spec, source = self._declared(name, array), self._cut_by[name]
        shapes = [ragged_output_shape(spec.dims, shape) for shape in self._shapes(requests, source)]
        parts = split_by_shapes(array, shapes)
        if parts is None:
            raise BackendError(
                f"model '{self.spec.name}' answered output '{name}' with {array.size} elements, but by the shapes of "
                f"input '{source}' its configuration promises {shapes[:8]}"
            )
        return parts

    def answer(self, outputs: Mapping[str, Array], request: Request) -> tuple[Tensor, ...]:
        """Return the requested outputs of one response, with any number of items, in the order of `outputs`.

        As in Triton, order, type and shape are those of the model's answer. What differs from the configuration is
        noted once. Raises BackendError for an undeclared output, and for one that cannot get its client's shape.
        """
        answered = [self._as_answered(name, array) for name, array in outputs.items()]
        requested = request.outputs
        return tuple([tensor for tensor in answered if not requested or tensor.name in requested])

    def _as_answered(self, name: str, array: Array) -> Tensor:
        spec = self._spec_of(name)
        is_declared_type = array.dtype == spec.dtype.numpy
        expected = spec.dims if spec.reshape is None else spec.reshape
        if self._has_batch_dim:
            expected = (-1, *expected)
        if is_declared_type and fits(array.shape, expected):
            return Tensor(
                name, spec.dtype, array if spec.reshape is None else self._reshape(array, spec.reshape, spec.dims)
            )
        if spec.reshape is not None:
            return Tensor(name, spec.dtype, self._checked(name, array, None))
        dtype = spec.dtype
        if not is_declared_type:
            with contextlib.suppress(KeyError):
                dtype = DType.from_numpy(array.dtype)
            if array.dtype != dtype.numpy:
                self._declared(name, array)  # raises: no tensor type, or another byte order
        self._note(
            name,
            f"output '{name}' was answered as {dtype.value} {list(array.shape)}, but its configuration promises "
            f"{spec.dtype.value} {list(expected)}: clients get the model's answer",
        )
        return Tensor(name, dtype, array)

    def _note(self, name: str, note: str) -> None:
        if name not in self.output_notes:
            self.output_notes[name] = note
            self._on_note(note)

    def _pick(self, whole: Mapping[str, Array], request: Request, rows: slice | None) -> tuple[Tensor, ...]:
        names: Sequence[str] = self._output_names
        if request.outputs:
            names = [name for name in names if name in request.outputs]
        specs = self._output_specs
        return tuple(
            [
                Tensor(name, specs[name].dtype, whole[name] if rows is None else whole[name][rows])
                for name in names
                if name in whole
            ]
        )

    def _checked(self, name: str, array: Array, total: int | None) -> Array:
        """Return the output in the shape for clients. It must have `total` items; None: any number."""
        spec = self._declared(name, array)
        item_dims = spec.dims if spec.reshape is None else spec.reshape
        expected = item_dims
        if self._has_batch_dim:
            if spec.is_shape_tensor and total is not None:
                values = repeat_values_per_row(array, spec.dims, total)
                if values is None:
                    given = (
                        f"the values {array.tolist()}"
                        if array.size <= _SHOWN_VALUES
                        else f"the shape {list(array.shape)}"
                    )
                    raise BackendError(
                        f"model '{self.spec.name}' answered shape tensor '{name}' with {given}, but its configuration "
                        f"promises the batch size {total} and then values of {list(spec.dims)}"
                    )
                return values
            expected = (-1 if total is None else total, *item_dims)
        shape = array.shape
        if shape != expected and not fits(shape, expected):
            lacks_items = self._has_batch_dim and total is not None and shape[:1] != (total,)
            if not spec.may_differ or lacks_items:
                raise BackendError(
                    f"model '{self.spec.name}' answered output '{name}' with shape {list(shape)}, "
                    f"but its configuration promises {list(expected)}"
                )
            self._note(
                name,
                f"output '{name}' was answered with shape {list(shape)}, where the metadata says {list(expected)}, "
                "which comes from the model file: clients get the shape that is computed, and dims in config.pbtxt "
                "correct the metadata",
            )
            return array
        return array if spec.reshape is None else self._reshape(array, spec.reshape, spec.dims)

    def _spec_of(self, name: str) -> OutputSpec:
        spec = self._output_specs.get(name)
        if spec is None:
            raise WrongOutput(f"model '{self.spec.name}' answered an output '{name}' that it does not declare")
        return spec

    def _declared(self, name: str, array: Array) -> OutputSpec:
        """Return the specification of an output. Raises WrongOutput for an unknown name or another type."""
        spec = self._spec_of(name)
        if array.dtype != spec.dtype.numpy:
            raise WrongOutput(
                f"model '{self.spec.name}' answered output '{name}' with elements of type {array.dtype}, "
                f"but its configuration promises {spec.dtype.value}"
            )
        return spec

    def _check_complete(self, whole: Mapping[str, object], requests: Sequence[Request]) -> None:
        for name in self.output_names(requests):
            if name not in whole:
                raise BackendError(
                    f"model '{self.spec.name}' did not answer output '{name}', which its configuration promises"
                )

    def _reshape(self, array: Array, given: tuple[int, ...], target: tuple[int, ...]) -> Array:
        """Reshape items from `given` to `target`. The n-th -1 of `target` has the size of the n-th -1 of `given`."""
        lead = array.shape[:1] if self._has_batch_dim else ()
        item_shape = array.shape[len(lead) :]
        free = iter([size for size, dim in zip(item_shape, given, strict=True) if dim == -1])
        return array.reshape(lead + tuple(next(free) if dim == -1 else dim for dim in target))
