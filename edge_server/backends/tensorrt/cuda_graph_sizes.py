"""Batch sizes for which a CUDA graph is recorded, and the graph for a batch.

Asked for as in Triton's configuration, `optimization { cuda { graphs: true } }`, with `graph_spec { batch_size: 4 }`
for each size wished for; or by onnxruntime's parameter `trt_cuda_graph_enable`. Without sizes: 1, the preferred batch
sizes, and max_batch_size. A batch between two sizes is filled up with rows of zeros to the next one: rows of a model
that batches do not depend on each other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from edge_server.backends.runtime_library import yes_or_no
from edge_server.core.model_spec import ModelSpec
from edge_server.errors import BadModelConfig


def captured_sizes(spec: ModelSpec) -> tuple[int, ...]:
    """Return the batch sizes to record, ascending; none where graphs are not asked for. 0 stands for a model that does
    not batch. Raises BadModelConfig."""
    cuda: dict[str, Any] = json.loads(spec.config_json).get("optimization", {}).get("cuda", {})
    is_wanted = bool(cuda.get("graphs")) or yes_or_no(spec.name, spec.parameters, "trt_cuda_graph_enable", False)
    if not is_wanted:
        return ()
    stated = sorted({int(item.get("batch_size", 0)) for item in cuda.get("graph_spec", [])})
    if spec.max_batch_size == 0:
        return (0,)
    for size in stated:
        if not 1 <= size <= spec.max_batch_size:
            raise BadModelConfig(
                f"model '{spec.name}': graph_spec batch_size: expected 1 to max_batch_size {spec.max_batch_size}, "
                f"given {size}"
            )
    if stated:
        return tuple(stated)
    preferred = spec.dynamic_batching.preferred_batch_sizes if spec.dynamic_batching is not None else ()
    return tuple(sorted({1, spec.max_batch_size, *(size for size in preferred if size <= spec.max_batch_size)}))


def padded_size(sizes: Sequence[int], rows: int) -> int | None:
    """Return the smallest recorded size that takes so many rows, None when there is none. `sizes` ascend."""
    return next((size for size in sizes if size >= rows), None)
