"""A version is offered only after it answered as its configuration promises, and with numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import InputSpec, OutputSpec, WarmupInput, WarmupSample
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, NotWarmedUp


def fixed(house: Any, dtype: DType = DType.FP32, **more: Any) -> Any:
    """Return a model of whole, fixed shapes: the kind that a probe is made up for."""
    inputs, outputs = (InputSpec("IN", dtype, (4,)),), (OutputSpec("OUT", dtype, (4,)),)
    return house.spec(inputs=inputs, outputs=outputs, **more)


def declared(source: str = "zero") -> tuple[WarmupSample, ...]:
    return (WarmupSample("first light", 2, (WarmupInput("IN", DType.FP32, (4,), source),)),)


def answer(house: Any, make: Any) -> None:
    house.script.on_run = lambda name, inputs: {"OUT": make(inputs["IN"])}


def outcome(house: Any, spec: Any, mark: str) -> str | None:
    house.set_desired(spec, mark=mark)
    assert house.manager.wait_settled([spec.name], 20)
    failure: str | None = house.manager.failure(spec.name)
    return failure


BAD_ANSWERS: list[tuple[str, Any, str]] = [
    ("NaN", lambda array: np.full_like(array, np.nan), "output 'OUT' holds NaN or infinity"),
    ("infinity", lambda array: np.where(np.arange(array.size).reshape(array.shape) == 3, -np.inf, array), "infinity"),
    ("another shape", lambda array: np.concatenate([array, array]), "with shape"),
    ("another width", lambda array: array[:, :2].copy(), "with shape"),
    ("another type", lambda array: array.astype(np.float64), "with elements of type float64"),
]


@pytest.mark.parametrize(("what", "make", "message"), BAD_ANSWERS, ids=[row[0] for row in BAD_ANSWERS])
@pytest.mark.parametrize("warmup", [(), declared()], ids=["probed", "declared"])
def test_a_version_that_answers_wrongly_never_replaces_one_that_works(
    house: Any, warmup: Any, what: str, make: Any, message: str
) -> None:
    old = house.load(fixed(house))
    answer(house, lambda array: make(np.array(array)).astype(make(np.zeros((1, 4), np.float32)).dtype))
    failure = outcome(house, fixed(house, warmup=warmup), "b")
    assert failure is not None
    assert message in failure
    assert house.manager.route("m", None) is old
    answer(house, np.array)
    assert house.load(fixed(house, warmup=warmup), mark="c").generation == 3, "a good upload heals it"


def test_the_parameter_warmup_allow_nan_permits_them(house: Any) -> None:
    answer(house, lambda array: np.full_like(array, np.nan))
    house.load(fixed(house, warmup=declared(), parameters={"warmup_allow_nan": "true"}))


def test_values_that_are_not_finite_in_the_sample_may_be_so_in_the_response(house: Any, tmp_path: Any) -> None:
    (tmp_path / "m" / "warmup").mkdir(parents=True)
    (tmp_path / "m" / "warmup" / "nan").write_bytes(np.array([np.nan, 0, 0, 0], np.float32).tobytes())
    sample = WarmupSample("nan", 1, (WarmupInput("IN", DType.FP32, (4,), "file", "nan"),))
    house.load(fixed(house, warmup=(sample,)), root=tmp_path)


def test_bf16_is_looked_at_bit_by_bit(house: Any) -> None:
    answer(house, lambda array: np.full_like(array, 0x7FC0))
    assert "NaN or infinity" in str(outcome(house, fixed(house, DType.BF16), "a"))
    answer(house, lambda array: np.full_like(array, 0x7F7F))
    assert outcome(house, fixed(house, DType.BF16), "b") is None


def test_integers_are_never_nan(house: Any) -> None:
    answer(house, lambda array: np.full_like(array, -1))
    house.load(fixed(house, DType.INT32))


def test_a_sound_model_that_has_no_finite_answer_to_zeros_is_served(house: Any) -> None:
    def normalise(name: str, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        with np.errstate(invalid="ignore"):
            return {"OUT": inputs["IN"] / np.linalg.norm(inputs["IN"])}

    house.script.on_run = normalise
    house.load(fixed(house))
    assert len(house.script.ran) == 2, "zeros, then random numbers"


def test_the_probe_runs_once_on_one_instance_and_is_not_counted(house: Any) -> None:
    version = house.load(fixed(house, instances=3))
    assert [rows for _, _, rows in house.script.ran] == [1]
    assert version.statistics().execution_count == 0


NO_PROBE = [
    ("a dimension of any size", {"inputs": (InputSpec("IN", DType.FP32, (-1,)),)}),
    ("strings", {"inputs": (InputSpec("IN", DType.BYTES, (4,)),)}),
    ("an optional input", {"inputs": (InputSpec("IN", DType.FP32, (4,), is_optional=True),)}),
    ("a shape tensor", {"inputs": (InputSpec("IN", DType.INT32, (4,), is_shape_tensor=True),)}),
    ("a decoupled model", {"is_decoupled": True}),
    ("the parameter warmup_probe", {"parameters": {"warmup_probe": "false"}}),
]


@pytest.mark.parametrize(("what", "more"), NO_PROBE, ids=[row[0] for row in NO_PROBE])
def test_nothing_is_made_up_for(house: Any, what: str, more: dict[str, Any]) -> None:
    house.load(house.spec(**({"inputs": (InputSpec("IN", DType.FP32, (4,)),)} | more)))
    assert house.script.ran == []


@pytest.mark.parametrize("key", ["warmup_probe", "warmup_allow_nan"])
def test_a_parameter_with_another_word_than_true_or_false_is_refused(house: Any, key: str) -> None:
    assert f"parameter {key} must be true or false" in str(outcome(house, house.spec(parameters={key: "maybe"}), "a"))


def test_a_probe_that_the_runtime_refuses_names_the_way_out(house: Any) -> None:
    def fail(name: str, inputs: Any) -> Any:
        raise ValueError("index out of range")

    house.script.on_run = fail
    said = str(outcome(house, fixed(house), "a"))
    assert "index out of range" in said
    assert "warmup_probe" in said


def test_a_probe_judges_as_the_load_did(house: Any) -> None:
    answer(house, lambda array: np.full_like(array, np.nan) if not np.any(array) else np.array(array))
    assert house.load(fixed(house)).probe() > 0


def test_a_probe_of_guessed_inputs_that_do_not_suit_says_that_nothing_was_tried(house: Any) -> None:
    def refuse(name: str, inputs: Any) -> Any:
        raise BackendError(f"too small: {inputs['IN'].shape}")

    house.script.on_run = refuse
    version = house.load(house.spec(inputs=(InputSpec("IN", DType.FP32, (-1, 3)),)))
    with pytest.raises(NotWarmedUp, match=r"IN \[1, 1, 3\]; then 64 .* model_warmup .* too small: \(1, 1, 3\)"):
        version.probe()
    assert [rows for _, _, rows in house.script.ran] == [1, 1], "with 1 and with 64"
