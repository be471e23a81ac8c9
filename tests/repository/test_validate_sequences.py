"""sequence_batching as configurations state it, and against the model's file."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from edge_server.backends.base import ModelSignature
from edge_server.core.ensemble_and_sequence_spec import (
    ControlInput,
    ControlKind,
    DirectStrategy,
    InitialState,
    OldestStrategy,
    SequenceBatching,
    StateTensor,
)
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BadModelConfig
from edge_server.repository.model_config.auto_complete import check_against_file, complete
from edge_server.repository.model_config.pbtxt import parse_text
from edge_server.repository.model_config.validate_sequences_and_ragged_batches import _check_names

IO = 'input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }\noutput { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }\n'
GOOD = 'backend: "identity"\nmax_batch_size: 4\n' + IO
START = 'control_input { name: "s" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }\n'
READY = 'control_input { name: "r" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }\n'
END = 'control_input { name: "e" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 5, 6 ] } }\n'
ID = 'control_input { name: "i" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }\n'
STATE = (
    'state { input_name: "h" output_name: "hn" data_type: TYPE_FP32 dims: [ 2, -1 ] use_growable_memory: true '
    "use_same_buffer_for_input_output: true "
    'initial_state { name: "zeros" data_type: TYPE_FP32 dims: [ 2, 3 ] zero_data: true } }\n'
)


def batching(*parts: str) -> str:
    return "sequence_batching {\n" + "".join(parts) + "}\n"


def test_a_sequence_configuration_is_taken_as_written(resolved: Callable[[str], ModelSpec]) -> None:
    spec = resolved(GOOD + batching("oldest { max_candidate_sequences: 7 preferred_batch_size: [ 4, 2 ] }\n",
                                    START, READY, END, ID, STATE))  # fmt: skip
    assert spec.sequence == SequenceBatching(
        OldestStrategy(7, (2, 4)),
        1_000_000,
        (
            ControlInput("s", ControlKind.START, DType.FP32, (0, 1)),
            ControlInput("r", ControlKind.READY, DType.BOOL, (False, True)),
            ControlInput("e", ControlKind.END, DType.INT32, (5, 6)),
            ControlInput("i", ControlKind.CORRID, DType.BYTES),
        ),
        (StateTensor("h", "hn", DType.FP32, (2, -1), InitialState("zeros", DType.FP32, (2, 3)), True, True),),
    )
    assert spec.dynamic_batching is None
    assert not [note for note in spec.notes if "sequence" in note or "dynamic batching" in note]


def test_a_sequence_configuration_without_a_strategy_is_direct(resolved: Callable[[str], ModelSpec]) -> None:
    spec = resolved(GOOD + batching("max_sequence_idle_microseconds: 5\n"))
    assert spec.sequence == SequenceBatching(DirectStrategy(), 5)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GOOD + batching("oldest { }"), ["max_candidate_sequences", "1 or more", "given 0"]),
        (GOOD + batching("oldest { max_candidate_sequences: -1 }"), ["max_candidate_sequences", "given -1"]),
        (
            GOOD + batching("oldest { max_candidate_sequences: 1 preferred_batch_size: 5 }"),
            ["preferred_batch_size", "max_batch_size 4", "given 5"],
        ),
        (GOOD + batching("direct { minimum_slot_utilization: 1.5 }"), ["minimum_slot_utilization", "0 to 1", "1.5"]),
        (GOOD + batching("direct { minimum_slot_utilization: nan }"), ["minimum_slot_utilization", "nan"]),
        (GOOD + batching() + "dynamic_batching { }", ["dynamic_batching", "sequence_batching"]),
        (GOOD + batching() + "response_cache { enable: true }", ["response_cache", "sequence_batching"]),
        (GOOD + batching("iterative_sequence: true"), ["iterative_sequence", "backend 'python'", "'identity'"]),
        (GOOD + batching(START, START.replace('"s"', '"t"')), ["'t'", "CONTROL_SEQUENCE_START once", "'s'"]),
        (GOOD + batching(START, READY.replace('"r"', '"s"')), ["each name once", "'s' twice"]),
        (GOOD + batching(START.replace('"s"', '""')), ["name"]),
        (GOOD + batching(START.replace('"s"', '"x"')), ["'x'", "which input does not list"]),
        (GOOD + batching(START.replace("[ 0, 1 ]", "[ 0 ]")), ["'s'", "fp32_false_true", "two values", "[0.0]"]),
        (GOOD + batching(START.replace("fp32_false_true: [ 0, 1 ]", "")), ["'s'", "fp32_false_true", "given none"]),
        (
            GOOD + batching(START.replace("fp32", "int32_false_true: [ 0, 1 ] fp32")),
            ["'s'", "given int32_false_true, fp32_false_true"],
        ),
        (GOOD + batching('control_input { name: "s" }'), ["'s'", "one control", "given 0"]),
        (GOOD + batching(ID.replace("STRING", "FP32")), ["'i' data_type", "TYPE_UINT64", "given TYPE_FP32"]),
        (GOOD + batching(ID.replace("data_type: TYPE_STRING", "")), ["'i' data_type", "TYPE_UINT64"]),
        (
            GOOD + batching(ID.replace("data_type", "int32_false_true: [ 0, 1 ] data_type")),
            ["'i'", "data_type alone", "int32_false_true"],
        ),
        (GOOD + batching(STATE.replace('"h"', '"x"')), ["'x'", "which input does not list"]),
        (GOOD + batching(STATE.replace('"h"', '""')), ["input_name", "a name"]),
        (GOOD + batching(STATE.replace('"hn"', '""')), ["output_name", "a name"]),
        (GOOD + batching(STATE, STATE), ["each name once", "'h' twice"]),
        (GOOD + batching(STATE, STATE.replace('"h"', '"g"')), ["each name once", "'hn' twice"]),
        (GOOD + batching(STATE, START.replace('"s"', '"h"')), ["each name once", "'h' twice"]),
        (GOOD + batching(STATE.replace("dims: [ 2, -1 ]", "")), ["'h' dims", "at least one"]),
        (GOOD + batching(STATE.replace("[ 2, -1 ]", "[ 2, 0 ]")), ["'h' dims", "given 0"]),
        (GOOD + batching(STATE.replace("[ 2, 3 ]", "[ 2, -1 ]")), ["initial_state dims", "given -1"]),
        (GOOD + batching(STATE.replace("[ 2, 3 ]", "[ 3, 3 ]")), ["initial_state dims", "[2, -1]", "[3, 3]"]),
        (
            GOOD + batching(STATE.replace('"zeros" data_type: TYPE_FP32', '"zeros" data_type: TYPE_FP16')),
            ["initial_state data_type", "TYPE_FP32", "TYPE_FP16"],
        ),
        (GOOD + batching(STATE.replace("zero_data: true", "")), ["initial_state", "zero_data", "neither"]),
        (
            GOOD + batching(STATE.replace("zero_data: true", 'data_file: "../secret"')),
            ["data_file", "relative path", "../secret"],
        ),
        (GOOD + batching(STATE.replace('"hn"', '"y"')), ["output 'y'", "[2, -1]", "given TYPE_FP32 [1]"]),
        (
            GOOD + batching(STATE) + "model_transaction_policy { decoupled: true }",
            ["sequence_batching.state", "decoupled", "['h']"],
        ),
        (
            GOOD.replace("dims: [ 1 ] }\noutput", "dims: [ 1 ] allow_ragged_batch: true }\noutput") + batching(),
            ["allow_ragged_batch", "direct"],
        ),
        (
            GOOD + batching() + 'parameters { key: "variant" value { string_value: "lighter" } }',
            ["variant", "sequence_batching"],
        ),
    ],
)  # fmt: skip
def test_impossible_values_are_refused_with_the_expected_and_the_given(
    resolved: Callable[[str], ModelSpec], config: str, words: list[str]
) -> None:
    with pytest.raises(BadModelConfig) as refused:
        resolved(config)
    for word in words:
        assert word in str(refused.value)


SIGNATURE = ModelSignature(
    (
        InputSpec("x", DType.FP32, (-1, 1)),
        InputSpec("s", DType.FP32, (-1, 1)),
        InputSpec("h", DType.FP32, (-1, 2, -1)),
    ),
    (OutputSpec("y", DType.FP32, (-1, 1)), OutputSpec("hn", DType.FP32, (-1, 2, -1))),
    is_batchable=True,
)


def test_controls_and_states_are_no_inputs_and_outputs_of_clients() -> None:
    config = parse_text((batching(START, STATE) + "max_batch_size: 2").encode(), "m", "here")
    complete(config, "m", SIGNATURE, 4)
    assert [item.name for item in config.input] == ["x"]
    assert [item.name for item in config.output] == ["y"]
    assert config.WhichOneof("scheduling_choice") == "sequence_batching"
    check_against_file(config, "m", SIGNATURE)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (START.replace('"s"', '"t"'), ["control input 't'", "['h', 's', 'x']"]),
        (START.replace("fp32", "int32"), ["control input 's' data_type", "TYPE_FP32", "TYPE_INT32"]),
        (START.replace('"s"', '"h"'), ["control input 'h' dims", "[-1, 2, -1]", "[-1, 1]"]),
        (START + STATE.replace('"h"', '"g"'), ["state input 'g'", "given 'g'"]),
        (START + STATE.replace('"hn"', '"gn"'), ["state output 'gn'", "['hn', 'y']"]),
        (START + STATE.replace("[ 2, -1 ]", "[ 2, 2, 2 ]"), ["state input 'h' dims", "[-1, 2, 2, 2]"]),
        (START + STATE.replace("FP32", "FP16"), ["state input 'h' data_type", "TYPE_FP16"]),
        (STATE, ["missing ['s']"]),
    ],
)
def test_what_the_file_does_not_have_is_refused(part: str, words: list[str]) -> None:
    config = parse_text(("max_batch_size: 2\n" + IO + batching(part)).encode(), "m", "here")
    with pytest.raises(BadModelConfig) as refused:
        check_against_file(config, "m", SIGNATURE)
    for word in words:
        assert word in str(refused.value)


def test_names_of_states_are_not_each_compared_with_all_others(counted: Any) -> None:
    states = [
        SimpleNamespace(input_name=counted(f"i{number}"), output_name=counted(f"o{number}")) for number in range(1000)
    ]
    batching: Any = SimpleNamespace(control_input=[], state=states)
    counted.compared = 0
    _check_names(batching, "m")
    assert counted.compared < 50_000
    with pytest.raises(BadModelConfig, match="each name once, given 'i9' twice"):
        _check_names(SimpleNamespace(control_input=[SimpleNamespace(name=counted("i9"))], state=states), "m")
