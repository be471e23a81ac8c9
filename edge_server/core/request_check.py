"""Check of a request against the model's configuration: names, types and shapes of its inputs. Error messages follow
Triton's: clients match them."""

from __future__ import annotations

from collections.abc import Hashable
from math import prod

from edge_server.core.device_tensor import DeviceTensor
from edge_server.core.model_spec import InputSpec, ModelSpec
from edge_server.core.request_response import CheckedHeader, Request
from edge_server.core.shape_tensors import batched_shape_inputs
from edge_server.core.tensor import DType, Tensor, fits
from edge_server.errors import InvalidRequest

_INT32_MAX = 2**31 - 1

UNKNOWN_ID = "[request id: <id_unknown>] "
"""Start of the message about a request without an id, as Triton writes it."""


class RequestCheck:
    """Checks requests against one ModelSpec. Made once per version, used by any thread."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._limit = spec.max_batch_size
        self._inputs = {item.name: item for item in spec.inputs}
        self._output_names = tuple(item.name for item in spec.outputs)
        self._outputs = frozenset(self._output_names)
        self._strings = frozenset(item.name for item in spec.inputs if item.dtype is DType.BYTES)
        self._required = frozenset(item.name for item in spec.inputs if not item.is_optional)
        self._shape_tensors = batched_shape_inputs(spec)
        self._expected_dims = {
            item.name: item.dims if item.name in self._shape_tensors else spec.wire_dims(item.dims)
            for item in spec.inputs
        }
        shapes_vary = any(item.is_optional or -1 in item.dims for item in spec.inputs)
        self._keys_vary = shapes_vary or bool(self._shape_tensors)
        batches = spec.max_batch_size > 0
        self._ragged = frozenset(item.name for item in spec.inputs if item.allow_ragged_batch and batches)
        self._counted = frozenset(item.sources[0] for item in spec.batch_inputs if item.dtype is DType.INT32)

    def check_header(self, request: Request) -> CheckedHeader:
        """Check the request, and return the result for all requests with the same header. Stores it in the memo, if
        any.

        Raises InvalidRequest with Triton's text, which names model, tensor, expected and given.
        """
        outputs = self._output_names
        if request.outputs:
            outputs = tuple([name for name in outputs if name in request.outputs])
        header = CheckedHeader(
            self, self.count_items(request), self.merge_key(request), outputs, not self._shape_tensors
        )
        if request.memo is not None:
            request.memo.keep(header)
        return header

    def count_items(self, request: Request) -> int:
        """Return the request's number of items: its batch size, or 1 for a model that does not batch.

        Raises InvalidRequest with Triton's text, which names model, tensor, expected and given.
        """
        inputs = request.inputs
        if inputs.keys() != self._inputs.keys():
            self._check_names(request)
        item_count = 0
        for name, tensor in inputs.items():
            spec = self._inputs[name]
            if tensor.dtype is not spec.dtype:
                raise self._error(
                    request,
                    f"inference input '{name}' data-type is '{tensor.dtype.value}', but model '{self._spec.name}' "
                    f"expects '{spec.dtype.value}'",
                )
            item_count = self._check_shape(request, spec, tensor, item_count)
        for name in request.outputs:
            if name not in self._outputs:
                known = ", ".join(f"'{one}'" for one in self._outputs)
                raise self._error(
                    request, f"unexpected inference output '{name}' for model '{self._spec.name}', which has {known}"
                )
        return item_count or 1

    def check_utf8(self, request: Request) -> None:
        """Raise InvalidRequest for a string that is not UTF-8, which would fail the whole batch in a runtime that takes
        no other."""
        for name in self._strings & request.inputs.keys():
            for value in request.inputs[name].array.flat:
                try:
                    if isinstance(value, bytes):
                        value.decode()
                except UnicodeDecodeError as error:
                    reason = str(error)
                else:
                    continue
                raise self._error(
                    request,
                    f"input '{name}' for model '{self._spec.name}' has a string that is not UTF-8, which the model "
                    f"needs: {reason}",
                )

    def merge_key(self, request: Request) -> Hashable:
        """Return the key that two requests in one batch have in common: input names, item shapes (except of ragged
        inputs), and the values of shape tensors.

        A request with a shape tensor in GPU memory shares no batch: its values are not read here.
        """
        if not self._keys_vary:
            return None
        inputs = request.inputs
        if self._ragged:
            shapes = tuple(
                (name, () if name in self._ragged else inputs[name].shape[1:])
                for name in self._inputs
                if name in inputs
            )
        else:
            shapes = tuple((name, inputs[name].shape[1:]) for name in self._inputs if name in inputs)
        if not self._shape_tensors:
            return shapes
        given = [inputs[name] for name in self._inputs if name in self._shape_tensors and name in inputs]
        if any(isinstance(tensor, DeviceTensor) for tensor in given):
            return shapes, object()
        return shapes, tuple((tensor.name, tensor.array.tobytes()) for tensor in given)

    def _check_shape(self, request: Request, spec: InputSpec, tensor: Tensor, item_count: int) -> int:
        shape = tensor.shape
        limit = self._limit
        if limit and spec.is_shape_tensor:
            if not fits(shape, spec.dims):
                raise self._shape_error(request, spec, shape)
            return item_count
        item_shape = shape[1:] if limit else shape
        if (limit and not shape) or (item_shape != spec.dims and not fits(item_shape, spec.dims)):
            raise self._shape_error(request, spec, shape)
        if spec.name in self._counted and max(*shape, prod(shape)) > _INT32_MAX:
            # Reject only this request here. An error while the batch inputs are made would fail the whole batch.
            raise self._error(
                request,
                f"input '{spec.name}' for model '{self._spec.name}' has the shape {list(shape)}: expected sizes and a "
                f"number of elements of at most {_INT32_MAX}, which the model is told of in INT32",
            )
        if not limit:
            return item_count
        given: int = shape[0]
        if given == 0:
            raise self._shape_error(request, spec, shape)
        if given > limit:
            note = ""
            if self._spec.has_default_batch_size:
                note = (
                    f". NOTE: {limit} is a default: for larger requests, set max_batch_size in the model's config.pbtxt"
                )
            raise self._error(
                request, f"inference request batch-size must be <= {limit} for '{self._spec.name}', got {given}{note}"
            )
        if item_count not in (0, given):
            raise self._error(
                request,
                f"input '{spec.name}' batch size does not match other inputs for '{self._spec.name}': "
                f"expected {item_count}, got {given}",
            )
        return given

    def _check_names(self, request: Request) -> None:
        given = request.inputs.keys()
        missing = sorted(self._required - given)
        total, required = len(self._inputs), len(self._required)
        if (missing and len(given) != total) or not required <= len(given) <= total:
            expected = (
                f"expected {total} inputs but got {len(given)} inputs for model '{self._spec.name}'"
                if required == total
                else f"expected number of inputs between {required} and {total} but got {len(given)} inputs "
                f"for model '{self._spec.name}'"
            )
            raise self._error(
                request,
                f"{expected}. Got input(s) [{_quoted(sorted(given))}], but missing required input(s) "
                f"[{_quoted(missing)}]. Please provide all required input(s).",
            )
        for name in given:
            if name not in self._inputs:
                raise self._error(
                    request,
                    f"unexpected inference input '{name}' for model '{self._spec.name}', "
                    f"which has {_quoted(list(self._inputs))}",
                )

    def _shape_error(self, request: Request, spec: InputSpec, shape: tuple[int, ...]) -> InvalidRequest:
        expected, given = (",".join(map(str, dims)) for dims in (self._expected_dims[spec.name], shape))
        note = ""
        if spec.name in self._shape_tensors:
            note = (
                " NOTE: it is a shape tensor: it is sent without a batch dimension and without the batch size, which "
                "the server puts before its values."
            )
        elif self._spec.max_batch_size > 0:
            note = (
                f" NOTE: max_batch_size is {self._spec.max_batch_size}, so the first dimension of every input is the "
                "batch and must be at least 1; for a single item it is 1."
            )
        return self._error(
            request,
            f"unexpected shape for input '{spec.name}' for model '{self._spec.name}'. "
            f"Expected [{expected}], got [{given}].{note}",
        )

    def _error(self, request: Request, text: str) -> InvalidRequest:
        start = f"[request id: {request.id}] " if request.id else UNKNOWN_ID
        return InvalidRequest(f"{start}{text}")


def _quoted(names: list[str]) -> str:
    return ",".join(f"'{name}'" for name in names)
