"""Functions with which several backends describe a model: whether it batches, its precision, metadata and number of
instances."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edge_server.backends.base import MAX_METADATA_TEXT
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType


def is_batchable(inputs: Iterable[InputSpec], outputs: Iterable[OutputSpec]) -> bool:
    """Return whether every tensor has a leading dimension of any size in the file."""
    dims = [one.dims for one in inputs] + [one.dims for one in outputs]
    return all(shape[:1] == (-1,) for shape in dims)


MIXED_ROWS_NOTE = (
    "requests are not batched, because the file quantizes a whole batch by the largest value in it: max_batch_size in "
    "config.pbtxt batches them"
)


def bounded_metadata(texts: Mapping[str, str] | Iterable[tuple[str, str]]) -> Mapping[str, str]:
    """Return the texts of a file's metadata without those that are too long."""
    return {key: text for key, text in dict(texts).items() if len(text) <= MAX_METADATA_TEXT}


_FLOATS = {DType.FP16: "f16", DType.BF16: "bf16", DType.FP32: "f32", DType.FP64: "f64"}


def precision_of_tensors(spec: ModelSpec) -> str:
    """Return the arithmetic of a model by its inputs and outputs, for a model whose weights cannot be read.

    It is their only floating-point type, "int" if they have none, or "mixed" if they have several.
    """
    types = {item.dtype for item in spec.inputs} | {item.dtype for item in spec.outputs}
    floats = {_FLOATS[dtype] for dtype in types if dtype in _FLOATS}
    return floats.pop() if len(floats) == 1 else "mixed" if floats else "int"


def instance_count(spec: ModelSpec) -> int:
    """Return the total number of instances of a CPU model (at least 1)."""
    return max(1, sum(group.count for group in spec.instance_groups))
