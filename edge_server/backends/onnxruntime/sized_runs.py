"""ONNX Runtime sessions of one instance on a GPU, one per batch size: pads a batch to the next size, so that the plans
of convolutions are used again.

onnxruntime's CUDA provider makes the plans of all convolutions anew whenever a batch has another shape than the one
before. For a network of 50 convolutions that took 120 to 560 ms, where a run takes 1 ms (onnxruntime 1.31, cuDNN 9.19,
H200). So each session here gets batches of one size: 1, 2, 4 and so on. A batch between two sizes is padded with
rows of zeros. The price is that the weights are in GPU memory once for each size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np

from edge_server.backends.base import Array
from edge_server.backends.onnxruntime.session import NO_TARGETS, BoundRun
from edge_server.core.device_tensor import DeviceArray, DevicePiece, to_host_array
from edge_server.core.model_spec import ModelSpec

CONVOLUTIONS = frozenset((b"Conv", b"ConvTranspose", b"FusedConv", b"NhwcConv"))
"""Operators for which the CUDA provider asks cuDNN for a plan."""


def batch_sizes(spec: ModelSpec) -> tuple[int, ...]:
    """Return 1, 2, 4 ... and the model's largest batch. Empty if the first dimension of an input is not the rows of a
    batch, as in models that do not batch, or that get ragged inputs or shape tensors."""
    most = spec.max_batch_size
    if most < 2 or spec.batch_inputs or any(item.allow_ragged_batch or item.is_shape_tensor for item in spec.inputs):
        return ()
    return (*(1 << power for power in range((most - 1).bit_length())), most)


class SizedRuns:
    """One BoundRun for each batch size. Used by one instance, for one run at a time."""

    def __init__(self, runs: Mapping[int, BoundRun]) -> None:
        """`runs` has the batch sizes in ascending order. No batch may have more rows than the largest."""
        self._runs = runs
        self._sizes = tuple(runs)

    def can_bind(self, array: DeviceArray) -> bool:
        return self._runs[self._sizes[0]].can_bind(array)

    def run(
        self,
        outputs: Sequence[str],
        feeds: Mapping[str, Array | DeviceArray],
        targets: Mapping[str, DevicePiece] = NO_TARGETS,
    ) -> list[Array | DeviceArray]:
        """Run as BoundRun does. A padded batch goes through host memory, and writes no targets."""
        rows = next(iter(feeds.values())).shape[0]
        size = self._sizes[bisect_left(self._sizes, rows)]
        run = self._runs[size]
        if rows == size:
            return run.run(outputs, feeds, targets)
        padded: dict[str, Array] = {}
        for name, array in feeds.items():
            padded[name] = np.zeros((size, *array.shape[1:]), array.dtype)
            padded[name][:rows] = to_host_array(array)
        found = run.run(outputs, padded)
        return [array[:rows] if array.shape[:1] == (size,) else array for array in map(to_host_array, found)]

    def warm_up(self, spec: ModelSpec) -> None:
        """Run zeros at each size, so that plans exist before the first request. Raises onnxruntime's exceptions.

        Does nothing if the size of an input's row is not known.
        """
        rows = {item.name: item.dims if item.reshape is None else item.reshape for item in spec.inputs}
        if any(size < 0 for dims in rows.values() for size in dims):
            return
        outputs = [item.name for item in spec.outputs]
        for size, run in self._runs.items():
            run.run(outputs, {item.name: np.zeros((size, *rows[item.name]), item.dtype.numpy) for item in spec.inputs})
