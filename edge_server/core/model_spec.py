"""Class `ModelSpec`, the validated configuration of one model: inputs, outputs, batching, instances and more. Frozen; a
reload makes a new one.

Field names and meanings follow Triton's model_config.proto. Fields that the server does not use stay in `config_json`,
so that a client reads back the whole configuration. Durations end in `_us` (microseconds).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import NamedTuple

from edge_server.core.ensemble_and_sequence_spec import BatchInput, BatchOutput, Ensemble, SequenceBatching
from edge_server.core.tensor import DType
from edge_server.record import record


class InputSpec(NamedTuple):
    """One input. `dims` excludes the batch dimension if the model batches; -1 is a dimension of any size.

    `reshape`, if not None, is the shape for the runtime instead of `dims` (also without batch dimension).
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


class OutputSpec(NamedTuple):
    """One output. `dims` and `reshape` as for inputs (`reshape` is the shape that the runtime returns).

    `labels[i]` names class i; empty if the configuration names no label file. `may_differ`: the dims are what the model
    file declares, which its runtime does not enforce; an answer of another shape is no error.
    """

    name: str
    dtype: DType
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None
    is_shape_tensor: bool = False
    labels: tuple[str, ...] = ()
    may_differ: bool = False


class InstanceKind(enum.Enum):
    """Device kind of an instance group, with Triton's names."""

    AUTO = "KIND_AUTO"
    GPU = "KIND_GPU"
    CPU = "KIND_CPU"
    MODEL = "KIND_MODEL"


@record(frozen=True, slots=True)
class RateResource:
    """`count` units of the rate limiter's resource `name` that an instance holds while it runs.

    The units belong to its device, or to the whole server if `is_global`.
    """

    name: str
    count: int
    is_global: bool = False


@record(frozen=True, slots=True)
class InstanceGroup:
    """`count` instances for each of `gpus` (KIND_GPU), or `count` in total (other kinds).

    `resources` and `rate_priority` apply only with `--rate-limit=execution_count`. Priority n gets 1/n of the
    executions of priority 1.
    """

    name: str
    kind: InstanceKind
    count: int
    gpus: tuple[int, ...] = ()
    profiles: tuple[str, ...] = ()
    resources: tuple[RateResource, ...] = ()
    rate_priority: int = 1


class TimeoutAction(enum.Enum):
    """Action for a request that waited too long: reject it, or run it after all others."""

    REJECT = "REJECT"
    DELAY = "DELAY"


class QueuePolicy(NamedTuple):
    """Queue policy of one priority level. 0 means no limit, for both numbers."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_us: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@record(frozen=True, slots=True)
class DynamicBatching:
    """Triton's dynamic_batching, with `preferred_batch_sizes` sorted and never empty.

    `priority_levels` 0 means one queue; level 1 runs first. `queue_policies` maps a level to its policy. Other levels,
    and the single queue (level 0), use `default_queue_policy`.
    """

    preferred_batch_sizes: tuple[int, ...]
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    queue_policies: Mapping[int, QueuePolicy] = field(default_factory=dict)


class WarmupInput(NamedTuple):
    """Data for one input of a warm-up sample: `source` is "zero", "one", "random" or "file".

    `dims` excludes the batch dimension and has no -1. `file_name` is relative to the model's `warmup` folder.
    """

    name: str
    dtype: DType
    dims: tuple[int, ...]
    source: str
    file_name: str = ""


@record(frozen=True, slots=True)
class WarmupSample:
    """A warm-up request of `batch_size` rows (0: skip), run `count` times on every instance (0 acts as 1)."""

    name: str
    batch_size: int
    inputs: tuple[WarmupInput, ...]
    count: int = 1


class VersionPolicy(NamedTuple):
    """The version directories to serve: the `latest` highest ones, exactly `specific`, or (both unset) all."""

    latest: int | None = 1
    specific: tuple[int, ...] = ()


class ChatTemplate(NamedTuple):
    """Template of a tokenizer that turns chats into prompts. `text` is Jinja; `tokens` are the special tokens that it
    may name, e.g. `bos_token`. `special_texts` are those of all special tokens that are known."""

    text: str
    tokens: Mapping[str, str]
    special_texts: tuple[str, ...] = ()


class Accelerator(NamedTuple):
    """One entry of optimization.execution_accelerators: a runtime's accelerator and its options."""

    name: str
    parameters: Mapping[str, str]


class Optimization(NamedTuple):
    """The part of `optimization` that backends use. `graph_level` None means: not set."""

    graph_level: int | None = None
    cpu_accelerators: tuple[Accelerator, ...] = ()
    gpu_accelerators: tuple[Accelerator, ...] = ()


class Recognised(NamedTuple):
    """What the metadata of a model's file say that its configuration does not.

    `parameters` hold beside those of the configuration, `labels` of an output where it has none. Clients do not see
    them. Both are empty if nothing was recognised. `note` is for ModelSpec's notes.
    """

    parameters: Mapping[str, str]
    labels: Mapping[str, tuple[str, ...]]
    note: str


FIRST_RESPONSE_BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)
"""Upper bounds of the histogram of first responses, unless `model_metrics` states others. They are Triton's
(metric_model_reporter.h)."""


@record(frozen=True, slots=True)
class ModelSpec:
    """Complete configuration of one model: all names, types and shapes are known.

    `max_batch_size` 0: no batch dimension. N >= 1: dims exclude a leading dimension of 1..N rows.
    `parameters` are the `parameters` of config.pbtxt as plain strings. `recognised` adds to them.
    `ensemble` and `sequence` are None if the model is neither. `batch_inputs` and `batch_outputs` belong to ragged
    batches. `is_cached`: responses may come from the response cache. `cc_filenames` maps a GPU's compute capability
    ("8.7") to its model file.
    `config_json` is the whole normalised configuration in Triton's JSON form (proto field names, every primitive field
    printed, 64-bit integers as numbers).
    `has_default_batch_size`: `max_batch_size` comes from neither the configuration nor the model file.
    `notes` are sentences for the log and the index about choices (a runtime that was not used and why, fields that are
    kept but have no effect). `unlogged_notes` are for the index alone, because they hold for most models.
    `routine_notes` are those of both that report an ordinary choice and no obstacle.
    `warnings` are sentences about probable mistakes; the model serves all the same.
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
    recognised: Recognised | None = None
    metric_tags: Mapping[str, str] = field(default_factory=dict)
    first_response_buckets_ms: tuple[float, ...] = FIRST_RESPONSE_BUCKETS_MS
    optimization: Optimization = Optimization()
    ensemble: Ensemble | None = None
    sequence: SequenceBatching | None = None
    batch_inputs: tuple[BatchInput, ...] = ()
    batch_outputs: tuple[BatchOutput, ...] = ()
    is_cached: bool = False
    chat_template: ChatTemplate | None = None
    cc_filenames: Mapping[str, str] = field(default_factory=dict)
    config_json: str = "{}"
    has_default_batch_size: bool = False
    notes: tuple[str, ...] = ()
    unlogged_notes: tuple[str, ...] = ()
    routine_notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def input(self, name: str) -> InputSpec | None:
        return next((spec for spec in self.inputs if spec.name == name), None)

    def output(self, name: str) -> OutputSpec | None:
        return next((spec for spec in self.outputs if spec.name == name), None)

    @property
    def all_parameters(self) -> Mapping[str, str]:
        """The configuration's parameters and those that were recognised."""
        return self.parameters if self.recognised is None else {**self.recognised.parameters, **self.parameters}

    @property
    def unrecognised_note(self) -> str:
        """Why nothing was recognised, as "; ..." to end a sentence; "" if something was, or there was no attempt."""
        failed = self.recognised is not None and not self.recognised.parameters
        return f"; {self.recognised.note}" if failed and self.recognised is not None else ""

    def labels_of(self, output: OutputSpec) -> tuple[str, ...]:
        """Return the configuration's labels of an output, else those that were recognised."""
        recognised = {} if self.recognised is None else self.recognised.labels
        return output.labels or recognised.get(output.name, ())

    def wire_dims(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """Return `dims` for clients: with a leading -1 if the model batches."""
        return (-1, *dims) if self.max_batch_size > 0 else dims


class ModelFile(NamedTuple):
    """Files of one version on disk. `path` is the model file, or the model's directory if the format is a directory.
    `model_dir` is the model's folder in the repository. `memory_bytes` is what one instance takes, computed by the
    backend; 0 if it does not compute it. `operator_libraries` are those of `model_operations`, all in `model_dir`."""

    path: Path
    model_dir: Path
    version: int
    memory_bytes: int = 0
    operator_libraries: tuple[Path, ...] = ()

    @property
    def version_dir(self) -> Path:
        return self.model_dir / str(self.version)
