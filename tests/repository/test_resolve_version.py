"""From a model directory to a complete ModelSpec: completion, defaults, checks, labels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_server.backends.base import Backend
from edge_server.backends.onnxruntime.backend import OnnxRuntimeBackend
from edge_server.core.model_spec import (
    Accelerator,
    InstanceGroup,
    InstanceKind,
    ModelSpec,
    QueuePolicy,
    TimeoutAction,
    WarmupInput,
    WarmupSample,
)
from edge_server.core.tensor import DType
from edge_server.errors import BackendMissing, BadModelConfig, LoadError
from edge_server.plugins.tensorrt.backend import TensorRTBackend
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.model_config.config_to_spec import to_spec
from edge_server.repository.model_config.pbtxt import parse_text
from edge_server.repository.resolve_version import ResolveOptions, resolve

FULL = """
backend: "identity"
max_batch_size: {batch}
input {{ name: "x" data_type: TYPE_FP32 dims: [ 3 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ 3 ] }}
"""


@pytest.fixture
def resolved(root: Path) -> Callable[..., ModelSpec]:
    def call(name: str = "m", version: int = 1, config_json: str | None = None, **options: Any) -> ModelSpec:
        model = Scanner([root]).find(name)
        assert model is not None
        return resolve(model, version, ResolveOptions(**options), config_json).spec

    return call


@pytest.fixture
def identity(described: Any) -> Any:
    return described("identity", "")


def test_a_backend_without_a_file_serves_an_empty_version_directory(root: Path, add_model: Any, identity: Any) -> None:
    path = add_model("m", FULL.format(batch=0))
    model = Scanner([root]).find("m")
    assert model is not None
    found = resolve(model, 1, ResolveOptions())
    assert found.file.path == found.file.version_dir == path / "1"
    assert found.spec.default_model_filename == ""
    assert found.spec.dynamic_batching is None


@pytest.mark.parametrize(
    ("batch", "stated", "idle_us", "oldest"),
    [
        (8, "", 1_000_000, None),
        (8, "max_sequence_idle_microseconds: 7 direct {}", 7, None),
        (8, "oldest { max_candidate_sequences: 4 }", 1_000_000, [8]),
        (8, "oldest { max_candidate_sequences: 4 preferred_batch_size: [ 2 ] }", 1_000_000, [2]),
        (0, "oldest { max_candidate_sequences: 4 }", 1_000_000, []),
    ],
)
def test_the_configuration_read_back_states_the_defaults_of_sequence_batching(
    add_model: Any, identity: Any, resolved: Any, batch: int, stated: str, idle_us: int, oldest: list[int] | None
) -> None:
    add_model("m", FULL.format(batch=batch) + f"sequence_batching {{ {stated} }}")
    batching = json.loads(resolved().config_json)["sequence_batching"]
    assert batching["max_sequence_idle_microseconds"] == idle_us
    assert oldest is None or batching["oldest"]["preferred_batch_size"] == oldest


def test_defaults_are_filled_in_and_can_be_read_back(add_model: Any, identity: Any, resolved: Any) -> None:
    add_model("m", FULL.format(batch=8) + "dynamic_batching { }")
    spec = resolved()
    assert spec.name == "m"
    assert spec.instance_groups == (InstanceGroup("m", InstanceKind.CPU, 1),)
    assert spec.version_policy.latest == 1
    assert spec.dynamic_batching.preferred_batch_sizes == (8,)
    document = json.loads(spec.config_json)
    assert document["name"] == "m"
    assert document["version_policy"] == {"latest": {"num_versions": 1}}
    assert document["optimization"]["input_pinned_memory"] == {"enable": True}
    assert document["optimization"]["output_pinned_memory"] == {"enable": True}
    assert document["dynamic_batching"]["preferred_batch_size"] == [8]
    assert document["instance_group"][0]["kind"] == "KIND_CPU"


def test_what_clients_read_back_resolves_to_the_same_specification(
    add_model: Any, identity: Any, resolved: Any
) -> None:
    add_model("m", FULL.format(batch=8) + 'dynamic_batching { } metric_tags { key: "a" value: "b" }')
    first = resolved()
    assert resolved(config_json=first.config_json) == first


def test_pinned_memory_that_was_turned_off_stays_off(add_model: Any, identity: Any, resolved: Any) -> None:
    add_model("m", FULL.format(batch=0) + "optimization { input_pinned_memory { enable: false } }")
    assert json.loads(resolved().config_json)["optimization"]["input_pinned_memory"] == {"enable": False}


@pytest.mark.parametrize(
    ("groups", "gpu_count", "runs_on_gpu", "expected"),
    [
        ("", 0, True, [("m", "CPU", 2, ())]),
        ("", 2, True, [("m", "GPU", 1, (0, 1))]),
        ("", 2, False, [("m", "CPU", 2, ())]),
        ("instance_group { count: 3 }", 0, True, [("m_0", "CPU", 3, ())]),
        ("instance_group { kind: KIND_CPU } instance_group { name: 'g' kind: KIND_MODEL }", 1, True,
         [("m_0", "CPU", 2, ()), ("g", "MODEL", 1, ())]),
        ("instance_group { gpus: 1 }", 2, False, [("m_0", "GPU", 1, (1,))]),
        ("instance_group { kind: KIND_GPU count: 2 }", 1, False, [("m_0", "GPU", 2, (0,))]),
    ],
)  # fmt: skip
def test_instance_groups_get_names_kinds_counts_and_devices(
    add_model: Any, identity: Any, resolved: Any, groups: str, gpu_count: int, runs_on_gpu: bool, expected: Any
) -> None:
    identity.runs_on_gpu = runs_on_gpu
    identity.default_instance_count = 2
    add_model("m", FULL.format(batch=0) + groups)
    found = [(g.name, g.kind.name, g.count, g.gpus) for g in resolved(gpu_count=gpu_count).instance_groups]
    assert found == expected


@pytest.mark.parametrize(
    ("groups", "gpu_count", "words"),
    [
        ("instance_group { kind: KIND_GPU }", 0, ["'m_0'", "KIND_GPU", "no GPU"]),
        ("instance_group { gpus: 0 }", 0, ["no GPU"]),
        ("instance_group { gpus: 2 }", 2, ["0 to 1", "given 2"]),
        ("instance_group { gpus: -1 }", 2, ["given -1"]),
        ("instance_group { kind: KIND_CPU gpus: 0 }", 1, ["KIND_CPU", "expected no gpus"]),
        ("instance_group { kind: KIND_MODEL gpus: 0 }", 1, ["KIND_MODEL"]),
        ("instance_group { count: -1 }", 0, ["count", "given -1"]),
        ("instance_group { count: 2000000000 }", 0, ["count"]),
        ("instance_group { name: 'a' } instance_group { name: 'a' }", 0, ["'a' twice"]),
        ("instance_group { name: 'm_1' } instance_group { }", 0, ["a name of its own"]),
    ],
)
def test_an_instance_group_that_the_machine_cannot_serve_is_refused(
    add_model: Any, identity: Any, resolved: Any, groups: str, gpu_count: int, words: list[str]
) -> None:
    add_model("m", FULL.format(batch=0) + groups)
    with pytest.raises(BadModelConfig) as caught:
        resolved(gpu_count=gpu_count)
    assert "model 'm'" in caught.value.message
    for word in words:
        assert word in caught.value.message


def test_a_gpu_is_refused_for_a_runtime_that_computes_on_the_cpu(add_model: Any, identity: Any, resolved: Any) -> None:
    identity.no_gpu_reason = "computes on the CPU; other runs such files on a GPU"
    add_model("m", FULL.format(batch=0) + "instance_group { kind: KIND_GPU }")
    expected = "'m_0': expected KIND_CPU, given KIND_GPU: backend identity computes on the CPU; other runs"
    with pytest.raises(BadModelConfig, match=expected):
        resolved(gpu_count=2)
    add_model("auto", FULL.format(batch=0) + "instance_group { kind: KIND_AUTO }")
    assert [group.kind.name for group in resolved("auto", gpu_count=2).instance_groups] == ["CPU"]


EVERYTHING = """
backend: "identity" max_batch_size: 4 metric_tags { key: "line" value: "3" }
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } optional: true }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] reshape { } label_filename: "labels.txt" }
dynamic_batching {
  preferred_batch_size: [ 4, 2, 4 ] max_queue_delay_microseconds: 50 priority_levels: 3 default_priority_level: 2
  default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 7 allow_timeout_override: true }
  priority_queue_policy { key: 1 value { max_queue_size: 9 } }
}
model_warmup { name: "w" batch_size: 2 inputs { key: "x" value { data_type: TYPE_FP32 dims: 4 random_data: true } } }
optimization { graph { level: 0 }
  execution_accelerators { cpu_execution_accelerator { name: "openvino" parameters { key: "p" value: "1" } } } }
model_transaction_policy { decoupled: true } parameters { key: "k" value { string_value: "v" } }
version_policy { specific { versions: [ 3, 1 ] } }
"""


def test_every_field_that_is_acted_on_reaches_the_specification(add_model: Any, identity: Any, resolved: Any) -> None:
    add_model("m", EVERYTHING, {"labels.txt": b"cat\r\n\ndog"})
    spec = resolved()
    assert (spec.inputs[0].reshape, spec.inputs[0].is_optional) == ((2, 2), True)
    assert (spec.outputs[0].reshape, spec.outputs[0].labels) == ((), ("cat", "", "dog"))
    batching = spec.dynamic_batching
    assert batching.preferred_batch_sizes == (2, 4)
    assert (batching.max_queue_delay_us, batching.priority_levels, batching.default_priority_level) == (50, 3, 2)
    assert batching.default_queue_policy == QueuePolicy(TimeoutAction.DELAY, 7, True, 0)
    assert batching.queue_policies == {1: QueuePolicy(max_queue_size=9)}
    assert spec.warmup == (WarmupSample("w", 2, (WarmupInput("x", DType.FP32, (4,), "random"),), 1),)
    assert spec.optimization.graph_level == 0
    assert spec.optimization.cpu_accelerators == (Accelerator("openvino", {"p": "1"}),)
    assert spec.is_decoupled
    assert (dict(spec.parameters), dict(spec.metric_tags)) == ({"k": "v"}, {"line": "3"})
    assert (spec.version_policy.latest, spec.version_policy.specific) == (None, (1, 3))
    assert spec.notes == ()


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("optimization.cuda", "optimization { cuda { graphs: true } }"),
        ("model_operations", 'model_operations { op_library_filename: "a.so" }'),
        ("model_repository_agents", 'model_repository_agents { agents { name: "checksum" } }'),
        (
            "model_metrics of other families",
            'model_metrics { metric_control { metric_identifier { family: "nv_inference_count" } } }',
        ),
        ("cc_model_filenames", 'cc_model_filenames { key: "8.7" value: "orin.plan" }'),
    ],
)
def test_a_field_that_is_not_acted_on_is_kept_and_noted(
    add_model: Any, identity: Any, resolved: Any, field: str, text: str
) -> None:
    add_model("m", FULL.format(batch=0) + text)
    spec = resolved()
    assert spec.notes == (f"{field} is kept in the configuration but has no effect",)
    assert field.split()[0].partition(".")[0] in json.loads(spec.config_json)


BUCKETS = (
    'model_metrics {{ metric_control {{ metric_identifier {{ family: "nv_inference_first_response_histogram_ms" }} '
    "histogram_options {{ buckets: [ {} ] }} }} }}"
)


def test_the_buckets_of_the_first_response_are_the_models_own(add_model: Any, identity: Any, resolved: Any) -> None:
    add_model("m", FULL.format(batch=0) + BUCKETS.format("1, 2.5, 40"))
    assert resolved().first_response_buckets_ms == (1, 2.5, 40)
    message = parse_text((FULL.format(batch=0) + BUCKETS.format("1, 1")).encode(), "m")
    with pytest.raises(BadModelConfig, match=r"model_metrics: expected rising buckets, given \[1.0, 1.0\]"):
        to_spec(message)


@pytest.mark.parametrize(("backend", "count"), [(TensorRTBackend, 0), (OnnxRuntimeBackend, 2)])
def test_graphs_and_dla_cores_have_an_effect_with_tensorrt_only(backend: type[Backend], count: int) -> None:
    text = (
        'name: "m" backend: "b" optimization { cuda { graphs: true } } '
        "instance_group { secondary_devices { kind: KIND_NVDLA device_id: 1 } }"
    )
    assert len(to_spec(parse_text(text.encode(), "m"), used_fields=backend.used_fields).notes) == count


IO = 'input { name: "x" data_type: TYPE_FP32 dims: 3 } output { name: "y" data_type: TYPE_FP32 dims: 3 } '
CASES = [
    ('name: "other"' + IO, ["name", "'m'", "'other'"]),
    ("max_batch_size: -1" + IO, ["max_batch_size", "-1"]),
    ('input { name: "x" data_type: TYPE_FP32 dims: [ 3, 0 ] }', ["input 'x' dims", "given 0"]),
    ('input { name: "x" data_type: TYPE_FP32 dims: -2 }', ["input 'x' dims", "given -2"]),
    ('input { name: "x" data_type: TYPE_FP32 }', ["input 'x' dims", "none"]),
    ('input { name: "x" dims: 3 }', ["input 'x' data_type", "none"]),
    ("input { data_type: TYPE_FP32 dims: 3 }", ["input", "without a name"]),
    (IO + IO, ["'x' twice"]),
    (IO + 'output { name: "y" data_type: TYPE_FP32 dims: 3 }', ["output", "'y' twice"]),
    ('input { name: "x" data_type: TYPE_FP32 dims: 3 }', ["output", "at least one"]),
    ("", ["input", "at least one"]),
    ('input { name: "x" data_type: TYPE_FP32 dims: [ 3, 2 ] format: FORMAT_NHWC }', ["FORMAT_NHWC", "[3, 2]"]),
    ('input { name: "x" data_type: TYPE_FP32 dims: 2 reshape { } }', ["reshape", "[2]", "given []"]),
    ('input { name: "x" data_type: TYPE_FP32 dims: 6 reshape { shape: [ 2, 2 ] } }', ["reshape", "[6]", "[2, 2]"]),
    ('input { name: "x" data_type: TYPE_FP32 dims: -1 reshape { shape: [ 1, 2 ] } }', ["reshape", "[-1]"]),
    ("max_batch_size: 4 dynamic_batching { preferred_batch_size: 8 }" + IO, ["preferred_batch_size", "4", "given 8"]),
    ("max_batch_size: 4 dynamic_batching { preferred_batch_size: 0 }" + IO, ["preferred_batch_size", "given 0"]),
    ("max_batch_size: 4 dynamic_batching { priority_levels: 2 }" + IO, ["default_priority_level", "none"]),
    (
        "max_batch_size: 4 dynamic_batching { priority_levels: 18446744073709551615 default_priority_level: 1 }" + IO,
        ["priority_levels", "1024", "given 18446744073709551615"],
    ),
    (
        "max_batch_size: 4 dynamic_batching { priority_levels: 2 default_priority_level: 3 }" + IO,
        ["default_priority_level", "given 3"],
    ),
    (
        "max_batch_size: 4 dynamic_batching { priority_levels: 2 default_priority_level: 1 preserve_ordering: true } "
        + IO,
        ["preserve_ordering", "priority_levels"],
    ),
    (
        "max_batch_size: 4 dynamic_batching { priority_levels: 1 default_priority_level: 1 "
        "priority_queue_policy { key: 2 value { } } }" + IO,
        ["priority_queue_policy", "given 2"],
    ),
    (
        "response_cache { enable: true } model_transaction_policy { decoupled: true }" + IO,
        ["response_cache", "decoupled"],
    ),
    ("response_cache { enable: true } sequence_batching { }" + IO, ["response_cache", "sequence_batching"]),
    ("sequence_batching { oldest { } }" + IO, ["sequence_batching", "max_candidate_sequences"]),
    ("ensemble_scheduling { }" + IO, ["backend", "ensemble", "identity"]),
    ("batch_input { }" + IO, ["batch_input", "max_batch_size 0"]),
    ("version_policy { specific { versions: -1 } }" + IO, ["versions"]),
    ("version_policy { latest { num_versions: 0 } }" + IO, ["version_policy.latest.num_versions", "1 or more", "0"]),
    ("version_policy { latest { } }" + IO, ["version_policy.latest.num_versions", "1 or more"]),
    (f"instance_group {{ count: 600 gpus: [ {', '.join(['0'] * 500)} ] }}" + IO, ["instance_group", "1024", "300000"]),
    ("instance_group { count: 1000 } instance_group { count: 25 }" + IO, ["instance_group", "1024", "given 1025"]),
    ('default_model_filename: "../x"' + IO, ["default_model_filename", "'../x'"]),
    ('default_model_filename: "/etc/passwd"' + IO, ["default_model_filename"]),
    ('cc_model_filenames { key: "8.7" value: "/x" }' + IO, ["cc_model_filenames['8.7']"]),
    ('model_warmup { name: "w" batch_size: 2 }' + IO, ["model_warmup 'w' batch_size"]),
    ('model_warmup { name: "w" }' + IO, ["model_warmup 'w' inputs", "['x']"]),
    (
        'model_warmup { name: "w" inputs { key: "z" value { data_type: TYPE_FP32 dims: 3 zero_data: true } } }' + IO,
        ["'z'", "['x']"],
    ),
    (
        'model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_INT8 dims: 3 zero_data: true } } }' + IO,
        ["TYPE_FP32", "TYPE_INT8"],
    ),
    (
        'model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_FP32 dims: -1 zero_data: true } } }' + IO,
        ["dims", "[-1]"],
    ),
    (
        'model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_FP32 dims: 4 zero_data: true } } }' + IO,
        ["[3]", "[4]"],
    ),
    ('model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_FP32 dims: 3 } } }' + IO, ["zero_data"]),
    (
        'model_warmup { inputs { key: "x" value { data_type: TYPE_FP32 dims: 3 input_data_file: "../../k" } } }' + IO,
        ["input_data_file", "'../../k'"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), CASES)
def test_a_contradiction_is_refused_with_model_field_expected_and_given(
    add_model: Any, identity: Any, resolved: Any, text: str, words: list[str]
) -> None:
    add_model("m", 'backend: "identity" ' + text)
    with pytest.raises(BadModelConfig) as caught:
        resolved()
    for word in ["model 'm'", *words]:
        assert word in caught.value.message


STEP = """ensemble_scheduling { step { model_name: "other" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } } """


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ensemble_scheduling { } instance_group { }", ["instance_group", "an ensemble has no instances"]),
        (STEP + "instance_group { count: 2 }", ["instance_group", "an ensemble has no instances"]),
    ],
)
def test_an_ensemble_with_instances_is_refused_as_triton_does(
    add_model: Any, resolved: Any, text: str, words: list[str]
) -> None:
    add_model("m", text + IO)
    with pytest.raises(BadModelConfig) as caught:
        resolved()
    for word in ["model 'm'", *words]:
        assert word in caught.value.message


def test_a_version_that_is_not_there_is_a_load_error(add_model: Any, identity: Any, resolved: Any) -> None:
    add_model("m", FULL.format(batch=0))
    with pytest.raises(LoadError, match="no version 2"):
        resolved(version=2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../secret.txt", "inside"),
        ("/etc/hostname", "inside"),
        ("absent.txt", "does not exist"),
        ("1", "not a file"),
        ("link.txt", "is a link to a file outside"),
        ("latin.txt", "UTF-8"),
        ("loop.txt", "does not exist"),
    ],
)
def test_a_label_file_outside_the_model_or_unreadable_is_refused(
    root: Path, add_model: Any, identity: Any, resolved: Any, name: str, words: str
) -> None:
    (root / "secret.txt").write_text("secret")
    io = IO.replace('name: "y"', f'name: "y" label_filename: "{name}"')
    path = add_model("m", 'backend: "identity" ' + io, {"latin.txt": b"caf\xe9"})
    (path / "link.txt").symlink_to(root / "secret.txt")
    (path / "loop.txt").symlink_to(path / "loop.txt")
    with pytest.raises(BadModelConfig, match=words) as caught:
        resolved()
    assert "output 'y'" in caught.value.message


def test_a_label_file_may_be_a_link_inside_the_model(add_model: Any, identity: Any, resolved: Any) -> None:
    io = IO.replace('name: "y"', 'name: "y" label_filename: "labels.txt"')
    path = add_model("m", 'backend: "identity" ' + io, {"..data/labels.txt": b"a\nb\n"})
    (path / "labels.txt").symlink_to("..data/labels.txt")
    assert resolved().outputs[0].labels == ("a", "b")


def test_a_name_that_is_no_backend_is_a_missing_backend(add_model: Any, resolved: Any) -> None:
    add_model("m", 'backend: "quantum" ' + IO)
    with pytest.raises(BackendMissing, match=r"model 'm'.*quantum"):
        resolved()
