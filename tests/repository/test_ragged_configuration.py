"""batch_input, batch_output and allow_ragged_batch as configurations state them, and against the model's file."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from edge_server.backends.base import ModelSignature
from edge_server.core.ensemble_and_sequence_spec import BatchInput, BatchInputKind, BatchOutput
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BadModelConfig
from edge_server.repository.model_config import auto_complete
from edge_server.repository.model_config.auto_complete import check_against_file, complete
from edge_server.repository.model_config.pbtxt import new_config, parse_text
from edge_server.repository.model_config.validate_sequences_and_ragged_batches import check_ragged

RAGGED = 'input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }\n'
OUTPUT = 'output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }\n'
MADE = (
    'batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "n" data_type: TYPE_INT32 source_input: "x" }\n'
)
CUT = 'batch_output { target_name: "y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x" }\n'
GOOD = 'backend: "identity"\nmax_batch_size: 4\n' + RAGGED + OUTPUT


def test_a_ragged_configuration_is_taken_as_written_and_nothing_of_it_is_ignored(
    resolved: Callable[[str], ModelSpec],
) -> None:
    spec = resolved(GOOD + MADE + CUT)
    assert spec.inputs[0].allow_ragged_batch
    assert spec.batch_inputs == (BatchInput(BatchInputKind.ACCUMULATED_ELEMENT_COUNT, ("n",), DType.INT32, ("x",)),)
    assert spec.batch_outputs == (BatchOutput(("y",), ("x",)),)
    assert not [note for note in spec.notes if "ragged" in note]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GOOD.replace("max_batch_size: 4", "") + MADE, ["batch_input", "max_batch_size 0"]),
        (GOOD.replace("max_batch_size: 4", "") + CUT, ["batch_output", "max_batch_size 0"]),
        (GOOD + MADE.replace("INT32", "INT64"), ["'n'", "TYPE_INT32 or TYPE_FP32", "TYPE_INT64"]),
        (GOOD + MADE.replace('source_input: "x"', ""), ["exactly one input", "none"]),
        (GOOD + MADE.replace('source_input: "x"', 'source_input: [ "x", "x" ]'), ["exactly one input"]),
        (GOOD + MADE.replace('source_input: "x"', 'source_input: "z"'), ["['x']", "'z'"]),
        (GOOD + MADE.replace('"n"', '"x"'), ["'x'", "requests do not carry"]),
        (GOOD + MADE + MADE, ["each name once", "'n' twice"]),
        (GOOD + MADE.replace('target_name: "n"', ""), ["batch_input target_name", "none"]),
        (GOOD + MADE.replace('"n"', '""'), ["batch_input target_name", "empty"]),
        (GOOD.replace("allow_ragged_batch: true", "optional: true") + MADE, ["every request has", "'x'"]),
        (GOOD + CUT.replace('"y"', '"z"'), ["batch_output", "['y']", "'z'"]),
        (GOOD + CUT.replace('target_name: "y"', ""), ["batch_output target_name", "none"]),
        (GOOD + CUT + CUT, ["each name once", "'y' twice"]),
        (GOOD.replace(OUTPUT, OUTPUT.replace("-1", "2, -1")) + CUT, ["batch_output 'y'", "[-1]", "[2, -1]"]),
        (GOOD.replace("dims: [ -1 ] allow", "allow"), ["input 'x' dims", "ragged"]),
    ],
)
def test_a_tensor_of_the_batch_that_cannot_be_made_or_cut_is_refused(
    resolved: Callable[[str], ModelSpec], config: str, words: list[str]
) -> None:
    with pytest.raises(BadModelConfig) as refused:
        resolved(config)
    for word in ["model 'm'", *words]:
        assert word in refused.value.message


def in_file(*inputs: InputSpec) -> ModelSignature:
    return ModelSignature(inputs, (OutputSpec("y", DType.FP32, (-1,)),), True)


X = InputSpec("x", DType.FP32, (-1,))
N = InputSpec("n", DType.INT32, (-1,))


def test_the_files_flat_input_and_made_inputs_fit_and_are_not_asked_of_clients() -> None:
    config = parse_text((GOOD + MADE + CUT).encode(), "m")
    complete(config, "m", in_file(X, N), 4)
    check_against_file(config, "m", in_file(X, N))
    assert [item.name for item in config.input] == ["x"]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ((X,), ["batch_input", "['x']", "'n'"]),
        ((X, InputSpec("n", DType.FP32, (-1,))), ["batch_input 'n'", "TYPE_FP32", "TYPE_INT32"]),
        ((InputSpec("x", DType.FP32, (-1, -1)), N), ["input 'x'", "one dimension", "[-1, -1]"]),
        ((InputSpec("x", DType.INT8, (-1,)), N), ["input 'x'", "TYPE_INT8"]),
        ((X, N, InputSpec("more", DType.FP32, (-1,))), ["missing ['more']"]),
    ],
)
def test_a_file_that_is_not_made_for_the_ragged_batch_is_refused(
    inputs: tuple[InputSpec, ...], words: list[str]
) -> None:
    with pytest.raises(BadModelConfig) as refused:
        check_against_file(parse_text((GOOD + MADE + CUT).encode(), "m"), "m", in_file(*inputs))
    for word in words:
        assert word in refused.value.message


def test_names_are_not_each_compared_with_all_others(counted: Any) -> None:
    many = [counted(f"t{number}") for number in range(1000)]
    x = SimpleNamespace(name="x", allow_ragged_batch=True, dims=[-1], optional=False)
    made = [SimpleNamespace(target_name=[name], data_type=DType.INT32.number, source_input=["x"]) for name in many]
    inputs = [*(SimpleNamespace(**{**vars(x), "name": counted(f"i{number}")}) for number in range(1000)), x]
    config: Any = SimpleNamespace(max_batch_size=4, input=inputs, batch_input=made, output=[], batch_output=[])
    counted.compared = 0
    check_ragged(config, "m")
    made.append(made[-1])
    with pytest.raises(BadModelConfig, match="each name once, given 't999' twice"):
        check_ragged(config, "m")
    assert counted.compared < 50_000


def test_the_file_is_compared_with_the_known_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(name: str) -> Callable[[Any], set[str]]:
        plain: Callable[[Any], set[str]] = getattr(auto_complete, name)
        return lambda config: asked.append(name) or plain(config)  # type: ignore[func-returns-value]

    for name in ("flat_inputs", "split_outputs", "state_outputs"):
        monkeypatch.setattr(auto_complete, name, counted(name))
    config = new_config()
    signature = ModelSignature(
        tuple(InputSpec(f"i{number}", DType.FP32, (1,)) for number in range(50)),
        tuple(OutputSpec(f"o{number}", DType.FP32, (1,)) for number in range(50)),
        False,
    )
    complete(config, "m", signature, 0)
    check_against_file(config, "m", signature)
    assert len(config.input) == len(config.output) == 50
    assert len(asked) < 10
