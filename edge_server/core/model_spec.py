"""ModelSpec and its parts: what a model's configuration promised, frozen. Replaced on reload, never edited.

Field names and meanings follow Triton's model_config.proto; everything that the server does not act on stays in
`config_json`, so that a client reads back what was written. Durations end in `_us` (microseconds).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edge_server.core.composition_spec import BatchInput, BatchOutput, Ensemble, SequenceBatching
from edge_server.core.tensor import DType


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input. `dims` excludes the batch dimension when the model batches; -1 is a dimension of any size.

    `reshape`, when not None, is the shape handed to the runtime in place of `dims` (again without batch dimension).
    `format` is "FORMAT_NONE", "FORMAT_NHWC" or "FORMAT_NCHW".
    """

    name: str
    dtype: DType
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None
    format: str = "FORMAT_NONE"
    is_optional: bool = False
    is_shape_tensor: bool = False
    allow_ragged_batch: bool = False


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """One output; `dims` and `reshape` as for inputs (`reshape` is the shape the runtime yields).

    `labels[i]` names class i; empty when the configuration names no label file.
    """

    name: str
    dtype: DType
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None
    is_shape_tensor: bool = False
    labels: tuple[str, ...] = ()


class InstanceKind(enum.Enum):
    AUTO = "KIND_AUTO"
    GPU = "KIND_GPU"
    CPU = "KIND_CPU"
    MODEL = "KIND_MODEL"


@dataclass(frozen=True, slots=True)
class RateResource:
    """`count` of the resource `name` that an instance holds while it runs; of its device, or of all if `is_global`."""

    name: str
    count: int
    is_global: bool = False


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """`count` instances for each of `gpus` (KIND_GPU), or `count` in all (other kinds).

    `resources` and `rate_priority` count only under `--rate-limit=execution_count`; a priority of n has 1/n of the
    chances of priority 1.
    """

    name: str
    kind: InstanceKind
    count: int
    gpus: tuple[int, ...] = ()
    profiles: tuple[str, ...] = ()
    resources: tuple[RateResource, ...] = ()
    rate_priority: int = 1


class TimeoutAction(enum.Enum):
    """What becomes of a request that waited too long: refused, or served after all others."""

    REJECT = "REJECT"
    DELAY = "DELAY"


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How one priority level's queue treats waiting requests. 0 means no limit, for both numbers."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_us: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """Triton's dynamic_batching, with `preferred_batch_sizes` sorted and never empty.

    `priority_levels` 0 means one queue; level 1 is served first. `queue_policies` maps a level to its own policy;
    other levels, and the single queue (level 0), use `default_queue_policy`.
    """

    preferred_batch_sizes: tuple[int, ...]
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    queue_policies: Mapping[int, QueuePolicy] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """Data for one input of a warm-up sample: `source` is "zero", "one", "random" or "file".

    `dims` excludes the batch dimension and has no -1. `file_name` is relative to the model's `warmup` folder.
    """

    name: str
    dtype: DType
    dims: tuple[int, ...]
    source: str
    file_name: str = ""


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """A warm-up request of `batch_size` rows (0: skip), run `count` times on every instance (0 acts as 1)."""

    name: str
    batch_size: int
    inputs: tuple[WarmupInput, ...]
    count: int = 1


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which version directories to serve: the `latest` highest ones, exactly `specific`, or (both unset) all."""

    latest: int | None = 1
    specific: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One entry of optimization.execution_accelerators: a runtime's accelerator and its options."""

    name: str
    parameters: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Optimization:
    """The part of `optimization` that backends act on. `graph_level` None means: not set."""

    graph_level: int | None = None
    cpu_accelerators: tuple[Accelerator, ...] = ()
    gpu_accelerators: tuple[Accelerator, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the server promised about one model, complete: names, types and shapes are known.

    `max_batch_size` 0: no batch dimension anywhere. N >= 1: dims exclude a leading dimension of 1..N rows.
    `parameters` are config.pbtxt's `parameters` as plain strings.
    `ensemble` and `sequence` are None where the model is neither; `batch_inputs` and `batch_outputs` belong to ragged
    batches. `is_cached`: answers may come from the response cache. `cc_filenames` maps a GPU's compute capability
    ("8.7") to the file that is made for it.
    `config_json` is the whole configuration, normalised, in Triton's JSON form (proto field names, every primitive
    field printed, 64-bit integers as numbers).
    `notes` are sentences for the log and the index about choices made (a runtime passed over and why, fields that
    are kept but not acted on).
    """

    name: str
    backend: str
    platform: str
    max_batch_size: int
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    instance_groups: tuple[InstanceGroup, ...]
    version_policy: VersionPolicy = VersionPolicy()
    dynamic_batching: DynamicBatching | None = None
    warmup: tuple[WarmupSample, ...] = ()
    is_decoupled: bool = False
    default_model_filename: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    metric_tags: Mapping[str, str] = field(default_factory=dict)
    optimization: Optimization = Optimization()
    ensemble: Ensemble | None = None
    sequence: SequenceBatching | None = None
    batch_inputs: tuple[BatchInput, ...] = ()
    batch_outputs: tuple[BatchOutput, ...] = ()
    is_cached: bool = False
    cc_filenames: Mapping[str, str] = field(default_factory=dict)
    config_json: str = "{}"
    notes: tuple[str, ...] = ()

    def input(self, name: str) -> InputSpec | None:
        return next((spec for spec in self.inputs if spec.name == name), None)

    def output(self, name: str) -> OutputSpec | None:
        return next((spec for spec in self.outputs if spec.name == name), None)

    def wire_dims(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """Return `dims` as clients see them: with a leading -1 when the model batches."""
        return (-1, *dims) if self.max_batch_size > 0 else dims


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One version's file on disk.

    `path` is the model file, or the directory that is the model; `model_dir` is the model's folder in the repository.
    """

    path: Path
    model_dir: Path
    version: int

    @property
    def version_dir(self) -> Path:
        return self.model_dir / str(self.version)
