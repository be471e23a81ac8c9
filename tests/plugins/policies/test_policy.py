"""Parameters of a policy, its inputs made of an observation, and its actions."""

from __future__ import annotations

import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BadModelConfig, InvalidRequest
from edge_server.plugins.policies.policy import is_policy, make_policy

CAMERA = InputSpec("top", DType.FP32, (3, 4, 6))
STATE = InputSpec("state", DType.FP32, (2,))
PROMPT = InputSpec("prompt", DType.BYTES, (1,))
ACTION = OutputSpec("action", DType.FP32, (5, 2))
IMAGES = {"image_input": "top", "image_scale": "1/255"}


def policy(*inputs: InputSpec, batch: int = 4, outputs: tuple[OutputSpec, ...] = (ACTION,), **parameters: str) -> Any:
    return make_policy(spec(*inputs, batch=batch, outputs=outputs, **parameters))


def spec(
    *inputs: InputSpec, batch: int = 4, outputs: tuple[OutputSpec, ...] = (ACTION,), **parameters: str
) -> ModelSpec:
    parameters = {"policy_action_key": "actions", **parameters}
    return ModelSpec("act", "stub", "", batch, inputs, outputs, (), parameters=parameters)


def test_a_model_is_a_policy_by_its_action_key() -> None:
    assert is_policy(spec(STATE))
    assert not is_policy(replace(spec(STATE), parameters={}))


def test_values_come_from_their_keys_and_get_the_batch_dimension() -> None:
    found = policy(STATE, PROMPT, policy_inputs="state = observation/state, prompt=task").read(
        {"observation/state": np.array([1.0, 2.0]), "task": "pick", "other": np.zeros(9)}
    )
    assert found["state"].array.dtype == np.float32
    assert found["state"].array.tolist() == [[1.0, 2.0]]
    assert found["prompt"].array.tolist() == [[b"pick"]]


def test_maps_in_maps_are_keys_with_slashes() -> None:
    made = policy(STATE, policy_inputs="state=robot/arm/state")
    assert made.read({"robot": {"arm": {"state": [3, 4]}}})["state"].array.tolist() == [[3.0, 4.0]]
    assert made.read({b"robot/arm": {b"state": [3, 4]}})["state"].array.tolist() == [[3.0, 4.0]]
    with pytest.raises(
        InvalidRequest, match=re.escape("the observation lacks 'robot/arm/state'; given: 'robot/arm', 'm/")
    ):
        made.read({"m": {"x" * 100: 1}, "robot/arm": 1, "robot": {"arm": {}}})


def test_long_names_in_maps_take_no_memory_for_each_value() -> None:
    """A map of 60,000 values under a name of 1 MB, of which paths would take 60 GB."""
    made = policy(STATE)
    wide = {"n" * (1 << 20): dict.fromkeys(map(str, range(60_000)), 0), "state": [1, 2]}
    tracemalloc.start()
    made.read(wide)
    with pytest.raises(InvalidRequest, match="the observation lacks 'state'"):
        made.read({key: value for key, value in wide.items() if key != "state"})
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 16 << 20


def test_the_copies_of_an_observation_are_counted_before_they_are_made() -> None:
    made = policy(InputSpec("wide", DType.FP64, (-1,)), STATE)
    assert made.copied_bytes({"wide": np.zeros(1000, np.uint8), "state": np.zeros(2, np.float32)}) == 8000
    previous = InputSpec("previous", DType.FP32, (20, 2))
    made = policy(previous, policy_previous_input="previous")
    assert made.copied_bytes({"previous": np.zeros((0, 1 << 30), np.float32)}) == 20 * 4 << 30


def test_a_model_without_batches_gets_its_own_shape_with_or_without_a_leading_one() -> None:
    for dims, expected in (((2,), [5.0, 6.0]), ((1, 2), [[5.0, 6.0]])):
        made = policy(STATE._replace(dims=dims), batch=0)
        assert made.read({"state": np.array([5.0, 6.0])})["state"].array.tolist() == expected


def test_a_single_number_fits_an_input_of_one_value() -> None:
    made = policy(InputSpec("gripper", DType.FP32, (1,)))
    assert made.read({"gripper": 0.5})["gripper"].array.tolist() == [[0.5]]
    assert made.read({"gripper": np.float64(0.25)})["gripper"].array.tolist() == [[0.25]]


@pytest.mark.parametrize("is_planar", [False, True])
def test_a_picture_becomes_the_input_as_the_image_parameters_say(is_planar: bool) -> None:
    pytest.importorskip("cv2", reason="needs OpenCV, of the extra vision")
    picture = np.random.default_rng(0).integers(0, 255, (4, 6, 3), dtype=np.uint8)
    given = picture.transpose(2, 0, 1) if is_planar else picture
    found = policy(CAMERA, **IMAGES).read({"top": given})["top"].array
    np.testing.assert_allclose(found, picture.transpose(2, 0, 1)[None] / 255, rtol=1e-6)


def test_a_picture_of_another_size_is_resized_and_a_normalised_one_is_taken_as_it_is() -> None:
    pytest.importorskip("cv2", reason="needs OpenCV, of the extra vision")
    made = policy(CAMERA, **IMAGES)
    assert (
        made.read({"top": np.full((48, 72, 3), 255, np.uint8)})["top"].array.tolist() == np.ones((1, 3, 4, 6)).tolist()
    )
    ready = np.random.default_rng(0).random((3, 4, 6), np.float32)
    assert made.read({"top": ready})["top"].array.tolist() == [ready.tolist()]


def test_several_inputs_take_pictures() -> None:
    pytest.importorskip("cv2", reason="needs OpenCV, of the extra vision")
    made = policy(CAMERA, CAMERA._replace(name="wrist"), image_input="top, wrist", image_scale="1/255")
    found = made.read({"top": np.zeros((4, 6, 3), np.uint8), "wrist": np.full((4, 6, 3), 255, np.uint8)})
    assert (found["top"].array.max(), found["wrist"].array.min()) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        ({"prompt": "go"}, "the observation lacks 'state'; given: 'prompt'"),
        ({}, "the observation lacks 'state'; given: none"),
        ({"state": np.zeros(3)}, "'state' of the observation: expected shape [2], given [3]"),
        ({"state": np.zeros((2, 2))}, "'state' of the observation: expected shape [2], given [2, 2]"),
        ({"state": "1, 2"}, "'state' of the observation: expected an array of numbers, given '1, 2'"),
        ({"state": [[1], [1, 2]]}, "expected numbers, given lists of several lengths"),
        ({"state": [1, "a"]}, "expected an array of numbers, given a value of type list"),
        ({"state": None}, "expected an array of numbers, given a value of type NoneType"),
        ({"state": [1, 2], "prompt": np.zeros(2)}, "'prompt' of the observation: expected a text, given an array of"),
        ({"state": [1, 2], "prompt": ["a", "b"]}, "'prompt' of the observation: expected shape [1], given [2]"),
    ],
)
def test_a_wrong_observation_is_refused_with_its_key(observation: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        policy(STATE, PROMPT).read(
            {"prompt": "x", **observation} if "prompt" not in observation and observation else observation
        )


def test_numbers_are_not_rounded_to_whole_ones() -> None:
    made = policy(InputSpec("step", DType.INT64, (1,)))
    assert made.read({"step": np.uint8([7])})["step"].array.tolist() == [[7]]
    with pytest.raises(InvalidRequest, match="expected numbers that INT64 holds, given float64"):
        made.read({"step": np.array([7.5])})


def test_an_optional_input_may_be_absent() -> None:
    made = policy(STATE, InputSpec("previous", DType.FP32, (5, 2), is_optional=True))
    assert list(made.read({"state": [1, 2]})) == ["state"]


@pytest.mark.parametrize("given", [np.zeros((4, 6, 4), np.uint8), np.zeros((0, 6, 3), np.uint8)])
def test_an_array_that_is_no_picture_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="expected a picture"):
        policy(CAMERA, **IMAGES).read({"top": given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((48, 64, 3)), "uint8), or shape [3, 4, 6], given float64 of shape [48, 64, 3]"),
        (np.zeros((1, 48, 64, 3), np.int64), "uint8), or shape [3, 4, 6], given int64 of shape [1, 48, 64, 3]"),
        (np.zeros((1, 2, 48, 64, 3), np.uint8), "(height, width, 3) or (3, height, width), given [1, 2, 48, 64, 3]"),
    ],
)
def test_the_error_of_a_wrong_picture_names_what_was_given(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        policy(CAMERA, **IMAGES).read({"top": given})


def test_actions_come_under_their_key_without_the_batch_dimension() -> None:
    chunk = np.arange(10, dtype=np.float32).reshape(1, 5, 2)
    found = policy(STATE).actions({"action": chunk})
    assert list(found) == ["actions"]
    assert found["actions"].tolist() == chunk[0].tolist()


def test_a_shorter_horizon_cuts_the_actions_and_what_belongs_to_them() -> None:
    outputs = (ACTION, OutputSpec("gripper", DType.FP16, (5, 1)), OutputSpec("loss", DType.FP32, (1,)))
    made = policy(STATE, outputs=outputs, policy_horizon="3")
    arrays = {
        "action": np.ones((1, 5, 2), np.float32),
        "gripper": np.ones((1, 5, 1), np.float16),
        "loss": np.ones((1, 1)),
    }
    found = made.actions(arrays)
    assert {name: array.shape for name, array in found.items()} == {"actions": (3, 2), "gripper": (3, 1)}
    assert found["gripper"].dtype == np.float32


def test_bf16_becomes_float32() -> None:
    outputs = (OutputSpec("action", DType.BF16, (1, 2)),)
    assert policy(STATE, outputs=outputs).actions({"action": np.array([[[0x3F80, 0xC000]]], np.uint16)})[
        "actions"
    ].tolist() == [[1.0, -2.0]]


def test_the_output_named_as_the_key_holds_the_actions() -> None:
    outputs = (OutputSpec("value", DType.FP32, (1,)), OutputSpec("actions", DType.FP32, (5, 2)))
    made = policy(STATE, outputs=outputs)
    assert (made.output.name, made.horizon) == ("actions", 5)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"policy_horizon": "6"}, "'policy_horizon': expected at most the 5 rows of output 'action', given '6'"),
        ({"policy_horizon": "2.5"}, "expected a whole number above 0, at most 10000, given '2.5'"),
        ({"policy_dt_ms": "soon"}, "'policy_dt_ms': expected a number above 0, at most 60000, given 'soon'"),
        ({"policy_max_age_ms": "-1"}, "'policy_max_age_ms': expected a number above 0"),
        ({"policy_dt_ms": "nan"}, "'policy_dt_ms': expected a number above 0"),
        (
            {"policy_inputs": "state"},
            "'policy_inputs': expected INPUT=KEY, ..., each of the inputs (state) at most once",
        ),
        ({"policy_inputs": "stat=x"}, "given 'stat=x'"),
        ({"policy_inputs": "state=x, state=y"}, "given 'state=y'"),
        ({"policy_metadata": "[1]"}, "'policy_metadata': expected a JSON object, given '[1]'"),
        ({"policy_metadata": "{"}, "'policy_metadata': expected a JSON object"),
        ({"policy_action_key": ""}, "'policy_action_key': expected 1 to 200 characters"),
        ({"policy_frame_steps": "-1; 0"}, "'policy_frame_steps': expected whole numbers that rise to 0, as '-15, 0'"),
        ({"policy_frame_steps": "-2, -1"}, "expected whole numbers that rise to 0, as '-15, 0', given '-2, -1'"),
        ({"policy_frame_steps": "-1, -2, 0"}, "expected whole numbers that rise to 0"),
        ({"policy_frame_steps": "-20000, 0"}, "expected whole numbers that rise to 0"),
        ({"policy_frame_steps": "-15, 0"}, "expected as many steps as an input has frames in its dims, given '-15, 0'"),
        ({"policy_horizn": "5"}, "parameter 'policy_horizn': did you mean 'policy_horizon'?"),
    ],
)
def test_a_wrong_parameter_is_refused(parameters: dict[str, str], message: str) -> None:
    with pytest.raises(BadModelConfig, match=re.escape(message)):
        policy(STATE, **parameters)


def test_a_decoupled_model_is_no_policy() -> None:
    with pytest.raises(BadModelConfig, match="is decoupled: a policy gives one answer to an observation"):
        make_policy(replace(spec(STATE), is_decoupled=True))


def test_the_parameters_of_the_document_make_a_policy() -> None:
    pytest.importorskip("cv2", reason="needs OpenCV, of the extra vision")
    text = (Path(__file__).parents[3] / "docs/robots.md").read_text().partition("## openpi")[0]
    parameters = dict(re.findall(r'parameters \{ key: "(\w+)" value \{ string_value: "(.*)" \} \}', text))
    found = policy(CAMERA, STATE, **parameters)
    assert [(field.spec.name, field.key) for field in found.inputs] == [("top", "images/cam_high"), ("state", "state")]
    observation = {"images": {"cam_high": np.zeros((3, 48, 64), np.uint8)}, "state": [0, 0]}
    assert set(found.read(observation)) == {"top", "state"}


PREVIOUS = InputSpec("previous", DType.FP32, (5, 2))
FROZEN = InputSpec("frozen", DType.INT64, (1,))
CONTINUES = {"policy_previous_input": "previous", "policy_frozen_input": "frozen", "policy_inputs": "frozen=fixed"}


@pytest.mark.parametrize("batch", [0, 4])
def test_the_inputs_of_a_policy_that_continues_a_chunk_are_filled_up_with_zeros(batch: int) -> None:
    made = policy(PREVIOUS, FROZEN, batch=batch, **CONTINUES)
    found = made.read({"previous": np.ones((3, 2)), "fixed": 2})
    assert found["previous"].array.tolist()[-1 if batch else slice(None)] == [[1, 1]] * 3 + [[0, 0]] * 2
    assert found["frozen"].array.ravel().tolist() == [2]
    assert made.read({"previous": np.ones((9, 2))})["previous"].array.sum() == 10
    for name, array in made.read({}).items():
        assert array.array.shape == ((1,) if batch else ()) + made.spec.input(name).dims
        assert not array.array.any()
    with pytest.raises(InvalidRequest, match=r"'previous' of the observation: expected actions \(rows, values\)"):
        made.read({"previous": np.ones(2)})
    with pytest.raises(InvalidRequest, match=r"'previous' of the observation: expected shape \[5, 2\], given \[5, 3\]"):
        made.read({"previous": np.ones((1, 3))})


def test_the_previous_actions_keep_their_number_where_the_input_has_any() -> None:
    made = policy(PREVIOUS._replace(dims=(-1, 2)), policy_previous_input="previous")
    assert made.read({"previous": np.ones((3, 2))})["previous"].array.shape == (1, 3, 2)
    assert made.read({})["previous"].array.shape == (1, 0, 2)


@pytest.mark.parametrize("name", ["other", "frozen", "prompt"])
def test_an_input_that_holds_no_actions_is_refused(name: str) -> None:
    with pytest.raises(BadModelConfig, match=r"'policy_previous_input': expected one of the inputs .* of shape"):
        policy(PREVIOUS, FROZEN, PROMPT._replace(dims=(5, 2)), policy_previous_input=name)


@pytest.mark.parametrize(("batch", "dims"), [(0, (7,)), (4, (1, 5, 2)), (0, (1, 1, 5, 2))])
def test_an_output_that_is_no_list_of_actions_is_refused(batch: int, dims: tuple[int, ...]) -> None:
    with pytest.raises(BadModelConfig, match=r"expected an output of shape \(actions, values\) as 'action', given"):
        policy(STATE, batch=batch, outputs=(ACTION._replace(dims=dims),))
