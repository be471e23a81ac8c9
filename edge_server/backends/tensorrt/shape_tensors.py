"""Shape tensors of TensorRT (tensors whose values are shapes): their configuration and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edge_server.backends.base import Array
from edge_server.backends.tensorrt.library_adapter import EngineFault, TensorInfo
from edge_server.core.device_tensor import DeviceArray, to_host_array
from edge_server.core.tensorrt_engine import Shape


def check_marks(tensors: Sequence[TensorInfo], marks: Mapping[str, bool]) -> None:
    """Raise EngineFault where a mark is_shape_tensor is not what the engine says; `marks` by tensor's name, of those
    that are to be checked."""
    for item in tensors:
        is_marked = marks.get(item.name, item.is_on_host)
        if is_marked != item.is_on_host:
            raise EngineFault(
                f"{'input' if item.is_input else 'output'} '{item.name}' is {'a' if item.is_on_host else 'no'} "
                f"shape tensor, the configuration says is_shape_tensor: {str(is_marked).lower()}"
            )


def values_of(array: Array | DeviceArray) -> Shape:
    """Return the values, whatever the number of dimensions. Raises ServingFault for a GPU's memory that is gone."""
    return tuple(int(value) for value in to_host_array(array).reshape(-1).tolist())
