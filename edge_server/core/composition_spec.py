"""What a configuration says beyond one model and one request: ensembles, sequences, tensors made from a batch.

Field names and meanings follow Triton's model_config.proto. Durations end in `_us` (microseconds).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from edge_server.core.tensor import DType


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One model of an ensemble. `version` None: the newest that serves.

    `input_map` maps an input of the step's model to a tensor of the ensemble, `output_map` an output of it to one.
    """

    model: str
    version: int | None
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Steps in the order of the configuration. `max_inflight_requests` bounds what a decoupled step may run ahead of
    the steps that take its responses; 0: no bound."""

    steps: tuple[EnsembleStep, ...]
    max_inflight_requests: int = 0


class ControlKind(enum.Enum):
    """What a control input tells the model. The value is its number in model_config.proto."""

    START = 0
    READY = 1
    END = 2
    CORRID = 3


@dataclass(frozen=True, slots=True)
class ControlInput:
    """An input of the model that the sequence scheduler fills, shape [1] or [rows, 1].

    `false_true` are the two values of a flag in `dtype` (INT32, FP32 or BOOL); a correlation id has none, and its
    `dtype` is UINT64, INT64, UINT32, INT32 or BYTES.
    """

    name: str
    kind: ControlKind
    dtype: DType
    false_true: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class InitialState:
    """What a state begins as: zeros where `file_name` is "", else a raw file of the model's `initial_state` folder."""

    name: str
    dtype: DType
    dims: tuple[int, ...]
    file_name: str = ""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """Implicit state: the output `output_name` of one request is the input `input_name` of the sequence's next."""

    input_name: str
    output_name: str
    dtype: DType
    dims: tuple[int, ...]
    initial: InitialState | None = None
    uses_same_buffer: bool = False
    is_growable: bool = False


@dataclass(frozen=True, slots=True)
class DirectStrategy:
    """Each sequence owns a row of an instance's batch. `minimum_slot_utilization`, 0 to 1, is how many of the rows must
    be ready before `max_queue_delay_us` has passed."""

    max_queue_delay_us: int = 0
    minimum_slot_utilization: float = 0.0


@dataclass(frozen=True, slots=True)
class OldestStrategy:
    """Requests of at most `max_candidate_sequences` sequences are batched together, the oldest first."""

    max_candidate_sequences: int
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """How the requests of one sequence stay together. A sequence idle for longer than `max_idle_us` is closed."""

    strategy: DirectStrategy | OldestStrategy = DirectStrategy()
    max_idle_us: int = 1_000_000
    controls: tuple[ControlInput, ...] = ()
    states: tuple[StateTensor, ...] = ()
    is_iterative: bool = False


class BatchInputKind(enum.Enum):
    """What an input made from a ragged batch holds. The value is its number in model_config.proto."""

    ELEMENT_COUNT = 0
    ACCUMULATED_ELEMENT_COUNT = 1
    ACCUMULATED_ELEMENT_COUNT_WITH_ZERO = 2
    MAX_ELEMENT_COUNT_AS_SHAPE = 3
    ITEM_SHAPE = 4
    ITEM_SHAPE_FLATTEN = 5


@dataclass(frozen=True, slots=True)
class BatchInput:
    """Inputs that the server makes from the batch, out of the ragged inputs `sources`."""

    kind: BatchInputKind
    target_names: tuple[str, ...]
    dtype: DType
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """Outputs that are cut apart by the shapes of the inputs `sources` (kind BATCH_SCATTER_WITH_INPUT_SHAPE)."""

    target_names: tuple[str, ...]
    sources: tuple[str, ...]
