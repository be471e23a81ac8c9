"""Configurations of models: config.pbtxt, Triton's JSON form, and label files.

A configuration that is read is written as JSON and read again as the same. One that is complete becomes a ModelSpec.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from input_reader import InputReader
from stubs import new_folder, result_of

from edge_server.errors import LoadError
from edge_server.repository.model_config.config_defaults import Devices, normalise
from edge_server.repository.model_config.config_to_spec import to_spec
from edge_server.repository.model_config.labels import read_labels
from edge_server.repository.model_config.pbtxt import parse_json, parse_text, write_json
from edge_server.repository.model_config.validate_config import check_complete, check_stated

_FOLDER = new_folder("model_config")
_DEVICES = Devices(gpu_count=2, cpu_instances=2)

_CONFIGS = (
    b'backend: "onnxruntime" max_batch_size: 8\ninput { name: "a" data_type: TYPE_FP32 dims: [ 3, -1 ] }\n'
    b'output [ { name: "b" data_type: TYPE_INT64 dims: 1 reshape { shape: [] } } ]\n'
    b"dynamic_batching { preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 100 "
    b"default_queue_policy { timeout_action: DELAY max_queue_size: 3 } }\n"
    b'instance_group { count: 2 kind: KIND_GPU gpus: 0 rate_limiter { resources { name: "R" count: 1 } } }\n',
    b'backend: "python" max_batch_size: 2 input { name: "x" data_type: TYPE_STRING dims: 1 }'
    b' output { name: "y" data_type: TYPE_BOOL dims: 1 }'
    b" sequence_batching { max_sequence_idle_microseconds: 5 oldest { max_candidate_sequences: 4 }"
    b' control_input { name: "S" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }'
    b' state { input_name: "i" output_name: "o" data_type: TYPE_FP32 dims: 2 } }'
    b' model_warmup { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_STRING dims: 1 zero_data: true'
    b" } } }",
    b'platform: "ensemble" input { name: "a" data_type: TYPE_FP32 dims: 1 } output { name: "b" data_type: TYPE_FP32 '
    b'dims: 1 } ensemble_scheduling { step { model_name: "m" model_version: -1 input_map { key: "i" value: "a" } '
    b'output_map { key: "o" value: "b" } } }',
    b'version_policy: { specific { versions: [ 1, 3 ] } } parameters { key: "k" value: { string_value: "v" } }'
    b' optimization { execution_accelerators { gpu_execution_accelerator : [ { name : "tensorrt" parameters '
    b"{ key: 'p' value: 'FP16' } } ] } } # a comment\nresponse_cache { enable: true }",
)


_BASE = write_json(parse_text(_CONFIGS[1], "m"))


def seeds() -> Iterable[bytes]:
    for config in _CONFIGS:
        yield b"\0" + config
        yield b"\1" + write_json(parse_text(config, "m")).encode()[:1500]
    yield b'\1{"name":"m","maxBatchSize":"4","input":[{"name":"a","data_type":"type_fp32","dims":["3"]}]}'
    yield bytes((3, 2, 14, 1, 15, 67, 160, 5, 160, 4, 10, 64, 24, 1, 25, 2, 30, 3))
    yield b"\2cat\ndog\r\n\nlast"
    yield b"\2\xef\xbb\xbfcup\n"


WORDS = (
    "name", "platform", "backend", "max_batch_size", "input", "output", "data_type", "dims", "reshape", "shape", "kind",
    "instance_group", "count", "gpus", "dynamic_batching", "preferred_batch_size", "max_queue_delay_microseconds",
    "priority_levels", "default_priority_level", "priority_queue_policy", "timeout_action", "DELAY", "REJECT", "key",
    "sequence_batching", "direct", "oldest", "control_input", "control", "state", "initial_state", "value", "zero_data",
    "ensemble_scheduling", "step", "model_name", "model_version", "input_map", "output_map", "version_policy", "latest",
    "num_versions", "specific", "versions", "parameters", "string_value", "optimization", "execution_accelerators",
    "cpu_execution_accelerator", "model_warmup", "batch_size", "inputs", "random_data", "batch_input", "target_name",
    "source_input", "TYPE_FP32", "TYPE_STRING", "TYPE_INT64", "KIND_GPU", "KIND_CPU", "rate_limiter", "resources",
    "label_filename", "format", "FORMAT_NCHW", "optional", "allow_ragged_batch", "response_cache", "enable",
    "is_shape_tensor",
    "model_transaction_policy", "decoupled", "default_model_filename", "cc_model_filenames", "is_non_linear_format_io",
)  # fmt: skip


def check(data: bytes) -> None:
    """The first byte is the kind of file: 0 text, 1 JSON, 2 labels, 3 JSON that is made of what the input gives."""
    kind, data = data[:1], data[1:]
    if kind == b"\2":
        _check_labels(data)
        return
    if kind == b"\3":
        take = InputReader(data)
        config = json.loads(_BASE)
        for _ in range(take.byte() & 7):
            config[take.choice(WORDS)] = take.json(WORDS, 5)
        made = json.dumps(config, ensure_ascii=False)
        config = result_of(lambda: parse_json(made, "m"), LoadError)
    elif kind == b"\1":
        text = data.decode("utf-8", "surrogateescape" if data[-1:] == b"s" else "replace")
        config = result_of(lambda: parse_json(text, "m"), LoadError)
    else:
        config = result_of(lambda: parse_text(data, "m"), LoadError)
    if config is None:
        return
    written = write_json(config)
    again = parse_json(written, "m")
    # NaN is not equal to itself: serialized, it is.
    assert again.SerializeToString(deterministic=True) == config.SerializeToString(deterministic=True), written
    config.name = "m"

    def spec() -> object:
        check_stated(config, "m")
        normalise(config, "m", _DEVICES)
        check_complete(config, "m")
        labels = {output.name: ("a",) for output in config.output if output.label_filename}
        return to_spec(config, labels)

    found = result_of(spec, LoadError)
    if found is not None:
        assert found.max_batch_size == config.max_batch_size
        assert [item.name for item in found.inputs] == [item.name for item in config.input]


def _check_labels(data: bytes) -> None:
    (_FOLDER / "labels.txt").write_bytes(data)
    labels = result_of(lambda: read_labels("m", "out", _FOLDER, "labels.txt"), LoadError)
    if labels is not None:
        assert all("\n" not in label for label in labels)
        text = data.decode("utf-8-sig")
        assert len(labels) == text.count("\n") + (not text.endswith("\n") and text != "")
        assert "\n".join(labels) == text.removesuffix("\n").replace("\r\n", "\n").removesuffix("\r")
