"""Data classes of the parts of a model's configuration about ensembles, sequences and ragged batches.

Field names and meanings follow Triton's model_config.proto. Durations end in `_us` (microseconds).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

from edge_server.core.tensor import DType


class EnsembleStep(NamedTuple):
    """One step of an ensemble. `version` None: the newest version that serves.

    `input_map` and `output_map` map the inputs and outputs of the step's model to tensors of the ensemble.
    """

    model: str
    version: int | None
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]


class Ensemble(NamedTuple):
    """Steps in the order of the configuration. `max_inflight_requests` limits the requests of each step in flight, over
    all requests to the ensemble; a decoupled step waits while they are reached. 0: no limit."""

    steps: tuple[EnsembleStep, ...]
    max_inflight_requests: int = 0


class ControlKind(enum.Enum):
    """Kind of a control input. The value is its number in model_config.proto."""

    START = 0
    READY = 1
    END = 2
    CORRID = 3


class ControlInput(NamedTuple):
    """An input of the model that the sequence scheduler fills. Its shape is [1] or [rows, 1].

    `false_true` holds the two values of a flag in `dtype` (INT32, FP32 or BOOL). A correlation id has None, and its
    `dtype` is UINT64, INT64, UINT32, INT32 or BYTES.
    """

    name: str
    kind: ControlKind
    dtype: DType
    false_true: tuple[float, float] | None = None


class InitialState(NamedTuple):
    """Initial value of a state: zeros if `file_name` is "", else a raw file in the model's `initial_state` folder."""

    name: str
    dtype: DType
    dims: tuple[int, ...]
    file_name: str = ""


class StateTensor(NamedTuple):
    """Implicit state: output `output_name` of a request is input `input_name` of the next request of its sequence."""

    input_name: str
    output_name: str
    dtype: DType
    dims: tuple[int, ...]
    initial: InitialState | None = None
    uses_same_buffer: bool = False
    is_growable: bool = False


class DirectStrategy(NamedTuple):
    """Each sequence owns a row of an instance's batch. A batch runs when the share `minimum_slot_utilization` (0 to 1)
    of the rows is ready, or after `max_queue_delay_us`."""

    max_queue_delay_us: int = 0
    minimum_slot_utilization: float = 0.0


class OldestStrategy(NamedTuple):
    """Batches the oldest requests of at most `max_candidate_sequences` sequences."""

    max_candidate_sequences: int
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False


class SequenceBatching(NamedTuple):
    """Triton's sequence_batching. A sequence that is idle for longer than `max_idle_us` is closed."""

    strategy: DirectStrategy | OldestStrategy = DirectStrategy()
    max_idle_us: int = 1_000_000
    controls: tuple[ControlInput, ...] = ()
    states: tuple[StateTensor, ...] = ()
    is_iterative: bool = False


class BatchInputKind(enum.Enum):
    """Content of a batch input. The value is its number in model_config.proto."""

    ELEMENT_COUNT = 0
    ACCUMULATED_ELEMENT_COUNT = 1
    ACCUMULATED_ELEMENT_COUNT_WITH_ZERO = 2
    MAX_ELEMENT_COUNT_AS_SHAPE = 3
    ITEM_SHAPE = 4
    ITEM_SHAPE_FLATTEN = 5


class BatchInput(NamedTuple):
    """Inputs `target_names` that the server makes from the shapes of the ragged inputs `sources`."""

    kind: BatchInputKind
    target_names: tuple[str, ...]
    dtype: DType
    sources: tuple[str, ...]


class BatchOutput(NamedTuple):
    """Outputs that are split by the shapes of the inputs `sources` (kind BATCH_SCATTER_WITH_INPUT_SHAPE)."""

    target_names: tuple[str, ...]
    sources: tuple[str, ...]
