"""Text and JSON formats of a configuration: accepted and refused input, and the error messages."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import BadModelConfig
from edge_server.repository.model_config.pbtxt import (
    MAX_CONFIG_BYTES,
    _without_duplicates,
    new_config,
    parse_json,
    parse_text,
    write_json,
)

TEXT = b"""
# a detector
name: "detector"
backend: "onnxruntime"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, -1, -1 ] } ]
output { name: "y" data_type: TYPE_STRING dims: 1 reshape { shape: [ ] } }
dynamic_batching { max_queue_delay_microseconds: 100 priority_queue_policy { key: 2 value { max_queue_size: 5 } } }
parameters { key: "k" value { string_value: "v" } }
"""


def test_text_with_comments_lists_and_nested_messages_is_read() -> None:
    config = parse_text(TEXT, "detector")
    assert list(config.input[0].dims) == [3, -1, -1]
    assert config.output[0].HasField("reshape")
    assert config.dynamic_batching.priority_queue_policy[2].max_queue_size == 5
    assert config.parameters["k"].string_value == "v"


@pytest.mark.parametrize(
    ("text", "known"),
    [
        (b"max_batchsize: 3", "max_batch_size"),
        (b'input { name: "x" data_tpe: TYPE_FP32 }', "data_type"),
        (b"input [ { data_type: TYPE_FLOAT32 } ]", "TYPE_FP32"),
        (b"dynamic_batching { max_queue_delay_usec: 3 }", "max_queue_delay_microseconds"),
        (b'parameters { key: "a" value { string: "x" } }', "string_value"),
    ],
)
def test_a_misspelt_field_or_value_is_answered_with_the_nearest_spelling(text: bytes, known: str) -> None:
    with pytest.raises(BadModelConfig, match=rf"[^.], did you mean '{known}'\?$"):
        parse_text(text, "m")


def test_a_misspelt_field_in_json_is_answered_with_the_nearest_spelling() -> None:
    with pytest.raises(BadModelConfig, match="did you mean 'max_batch_size'"):
        parse_json('{"max_batchsize": 3}', "m")


def test_a_byte_order_mark_is_skipped() -> None:
    """Windows' editors write one."""
    assert parse_text(b"\xef\xbb\xbfmax_batch_size: 3\n", "m").max_batch_size == 3


def test_a_field_that_resembles_no_known_one_is_refused_without_a_guess() -> None:
    with pytest.raises(BadModelConfig) as caught:
        parse_text(b"zzz: 1", "m")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'name: "m"\ninput {\n  nmae: "x"\n}', ["line 3", "nmae"]),
        (b"max_batch_size: 1\nmax_batch_size: 2", ["line 2", "max_batch_size"]),
        (b"max_batch_size: many", ["line 1", "max_batch_size"]),
        (b"max_batch_size: 99999999999", ["line 1"]),
        (b"input { data_type: TYPE_FP33 }", ["TYPE_FP33"]),
        (b"input {", ["line 1"]),
        (b'name: "m"\n\n# \xff', ["line 3", "UTF-8"]),
        (b"dynamic_batching {}\nsequence_batching {}", ["sequence_batching"]),
        (b"instance_group { kind: 77 }", ["kind", "77"]),
        (b"input { data_type: 99 }", ["data_type", "99"]),
        (b"max_batch_size: 1\ninput { data_type: 99999999999 }", ["line 2", "99999999999"]),
        (b"input { format: -2147483649 }", ["line 1", "-2147483649"]),
        (b"instance_group { kind: 4294967296 }", ["line 1", "4294967296"]),
        (b"optimization { priority: 99999999999 }", ["line 1", "99999999999"]),
        (b"dynamic_batching { default_queue_policy { timeout_action: 99999999999 } }", ["line 1", "99999999999"]),
        (b'model_warmup { inputs { key: "x" value { data_type: 99999999999 } } }', ["line 1", "99999999999"]),
        (b"sequence_batching { control_input { control { kind: 99999999999 } } }", ["line 1", "99999999999"]),
        (b"input { data_type: 0x" + b"f" * 5000 + b" }", ["digits"]),
        (b"[type.googleapis.com/x.Y] { }", ["line 1"]),
        (b"{" * 50_000, ["line 1"]),
    ],
)
def test_a_fault_in_the_text_names_the_model_and_the_line(text: bytes, words: list[str]) -> None:
    with pytest.raises(BadModelConfig) as caught:
        parse_text(text, "m")
    assert "model 'm'" in caught.value.message
    for word in words:
        assert word in caught.value.message


def test_a_configuration_that_is_too_large_is_refused_before_parsing() -> None:
    with pytest.raises(BadModelConfig, match="at most"):
        parse_text(b" " * (MAX_CONFIG_BYTES + 1), "m")
    with pytest.raises(BadModelConfig, match="at most"):
        parse_json(" " * (MAX_CONFIG_BYTES + 1), "m")


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_as_a_bad_configuration(content: bytes) -> None:
    with contextlib.suppress(BadModelConfig):
        parse_text(content, "m")


def test_json_takes_enum_names_in_any_case_and_numbers_as_strings() -> None:
    text = json.dumps(
        {
            "max_batch_size": "4",
            "input": [{"name": "x", "data_type": "type_fp32", "dims": ["3", -1], "format": "Format_Nchw"}],
            "instance_group": [{"kind": "kind_cpu", "count": 2}],
            "model_warmup": [{"inputs": {"x": {"data_type": "Type_Int8", "zero_data": True}}}],
            "dynamicBatching": {"defaultQueuePolicy": {"timeoutAction": "delay"}},
        }
    )
    config = parse_json(text, "m")
    assert (config.max_batch_size, config.input[0].data_type, config.input[0].format) == (4, 11, 2)
    assert list(config.input[0].dims) == [3, -1]
    assert config.instance_group[0].kind == 2
    assert config.model_warmup[0].inputs["x"].data_type == 6
    assert config.dynamic_batching.default_queue_policy.timeout_action == 1


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '"text"',
        "{",
        '{"no_such_field": 1}',
        '{"input": [{"nmae": "x"}]}',
        '{"max_batch_size": 1, "max_batch_size": 2}',
        '{"max_batch_size": 4.5}',
        '{"max_batch_size": 99999999999}',
        '{"max_batch_size": true}',
        '{"max_batch_size": NaN}',
        '{"input": [[1]]}',
        '{"input": {"name": "x"}}',
        '{"input": [{"data_type": "TYPE_FP33"}]}',
        '{"input": [{"data_type": 99}]}',
        '{"name": "\\ud800"}',
        '{"\\ud800": 1}',
        '{"a\\ud800": 1, "a\\ud800": 2}',
        '{"parameters": {"\\udfff": {"string_value": "x"}}}',
        '{"input": ["\\ud800"]}',
        '{"input": "\\ud800"}',
        '{"input": [{"data_type": 99999999999}]}',
        '{"input": [{"data_type": 1e400}]}',
        '{"input": [{"data_type": NaN}]}',
        '{"input": [{"data_type": 2.5}]}',
        '{"input": [{"data_type": true}]}',
        '{"instance_group": [{"kind": false}]}',
        '{"dynamic_batching": {}, "sequence_batching": {}}',
        "[" * 100_000,
        '{"max_batch_size": ' + "9" * 10_000 + "}",
    ],
)
def test_json_that_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(BadModelConfig, match="model 'm'") as refused:
        parse_json(text, "m")
    assert refused.value.message.encode(), "it can be sent and written"
    assert len(refused.value.message) < 2000


@pytest.mark.parametrize("text", [b"max_batch_size: " + b"9" * 1_000_000, b"input " + b"[" * 1_000_000])
def test_a_long_line_that_is_wrong_is_not_quoted_whole(text: bytes) -> None:
    with pytest.raises(BadModelConfig, match="line 1 column") as refused:
        parse_text(text, "m")
    assert len(refused.value.message) < 3000
    assert "Expected" in refused.value.message or "Couldn't parse integer" in refused.value.message


def test_a_key_that_stands_twice_among_many_is_found_in_one_pass(counted: Any) -> None:
    pairs = [(counted(f"key {number}"), None) for number in range(2000)]
    counted.compared = 0
    with pytest.raises(ValueError, match="'key 1999' occurs twice"):
        _without_duplicates([*pairs, (counted("key 1999"), None)])
    assert counted.compared < 20_000


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["input", "name", "dims", "parameters", "data_type", "kind"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(_JSON)
def test_any_json_is_read_or_refused_as_a_bad_configuration(document: Any) -> None:
    with contextlib.suppress(BadModelConfig):
        parse_json(json.dumps(document), "m")


def test_written_json_prints_unset_fields_and_wide_integers_as_numbers() -> None:
    config = parse_text(TEXT, "detector")
    document = json.loads(write_json(config))
    assert document["input"][0]["dims"] == [3, -1, -1]
    assert document["input"][0]["optional"] is False
    assert document["input"][0]["data_type"] == "TYPE_FP32"
    assert document["output"][0]["reshape"] == {"shape": []}
    assert document["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert document["dynamic_batching"]["priority_queue_policy"]["2"]["default_timeout_microseconds"] == 0
    assert document["default_model_filename"] == ""
    assert document["metric_tags"] == {}
    assert document["batch_input"] == []
    assert "sequence_batching" not in document
    assert "input_data_file" not in json.dumps(document)


_NAMES = st.text(min_size=1, max_size=6)
_SIZES = st.integers(-(2**63), 2**63 - 1)


@st.composite
def _configs(draw: st.DrawFn) -> Any:
    config = new_config()
    config.name = draw(_NAMES)
    config.max_batch_size = draw(st.integers(-(2**31), 2**31 - 1))
    for name in draw(st.lists(_NAMES, max_size=3)):
        dims = draw(st.lists(_SIZES, max_size=4))
        config.input.add(name=name, data_type=draw(st.integers(0, 14)), dims=dims, format=draw(st.integers(0, 2)))
    if draw(st.booleans()):
        config.dynamic_batching.max_queue_delay_microseconds = draw(st.integers(0, 2**64 - 1))
        policy = config.dynamic_batching.priority_queue_policy[draw(st.integers(0, 2**64 - 1))]
        policy.timeout_action = draw(st.integers(0, 1))
    config.version_policy.specific.versions.extend(draw(st.lists(_SIZES, max_size=3)))
    for key, value in draw(st.dictionaries(_NAMES, _NAMES, max_size=3)).items():
        config.parameters[key].string_value = value
    sample = config.model_warmup.add(name="w").inputs[draw(_NAMES)]
    sample.zero_data = draw(st.booleans())
    buckets = draw(st.lists(st.floats(allow_nan=False), max_size=3))
    config.model_metrics.metric_control.add().histogram_options.buckets.extend(buckets)
    return config


@given(_configs())
def test_written_json_reads_back_as_the_same_configuration(config: Any) -> None:
    assert parse_json(write_json(config), "m") == config
