"""A version is offered only after it answered as its configuration promises, and with numbers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends.base import SessionInfo
from edge_server.backends.builtin_decoupled_models import StreamingSession
from edge_server.core.batch import BatchPlan
from edge_server.core.model_spec import InputSpec, OutputSpec, WarmupInput, WarmupSample
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, NotWarmedUp, SessionLost
from edge_server.serving.execution import warmup


def fixed(core: Any, dtype: DType = DType.FP32, **more: Any) -> Any:
    """Return a model of whole, fixed shapes: the kind that a probe is generated for."""
    inputs, outputs = (InputSpec("IN", dtype, (4,)),), (OutputSpec("OUT", dtype, (4,)),)
    return core.spec(inputs=inputs, outputs=outputs, **more)


def declared(source: str = "zero") -> tuple[WarmupSample, ...]:
    return (WarmupSample("first light", 2, (WarmupInput("IN", DType.FP32, (4,), source),)),)


def answer(core: Any, make: Any) -> None:
    core.script.on_run = lambda name, inputs: {"OUT": make(inputs["IN"])}


def outcome(core: Any, spec: Any, mark: str) -> str | None:
    core.set_desired(spec, mark=mark)
    assert core.table.wait_settled([spec.name], 20)
    failure: str | None = core.router.failure(spec.name)
    return failure


def warning(core: Any, spec: Any, mark: str) -> str:
    """Return the warnings about a version that is served."""
    return " ".join(core.load(spec, mark=mark).report().warnings)


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
    core: Any, warmup: Any, what: str, make: Any, message: str
) -> None:
    old = core.load(fixed(core))
    answer(core, lambda array: make(np.array(array)).astype(make(np.zeros((1, 4), np.float32)).dtype))
    failure = outcome(core, fixed(core, warmup=warmup), "b")
    assert failure is not None
    assert message in failure
    assert core.router.route("m", None) is old
    answer(core, np.array)
    assert core.load(fixed(core, warmup=warmup), mark="c").generation == 3, "a good upload heals it"


@pytest.mark.parametrize(("what", "make", "message"), BAD_ANSWERS[:4], ids=[row[0] for row in BAD_ANSWERS[:4]])
def test_a_first_version_is_served_with_a_warning_whatever_it_answers_to_generated_inputs(
    core: Any, what: str, make: Any, message: str
) -> None:
    """Zeros are no valid input of every model: sizes, axes and steps cannot be 0."""
    answer(core, lambda array: make(np.array(array)).astype(np.float32))
    said = warning(core, fixed(core), "a")
    assert message in said
    assert "declare a model_warmup" in said
    assert "warmup_probe" in said
    assert message in warning(core, fixed(core), "b"), "its predecessor did not answer either"


def test_a_first_version_whose_output_has_another_type_is_refused(core: Any) -> None:
    """No input changes that."""
    answer(core, lambda array: np.array(array, np.float64))
    assert "with elements of type float64" in str(outcome(core, fixed(core), "a"))


def test_a_first_version_that_loses_its_session_is_refused(core: Any) -> None:
    def lose(name: str, inputs: Any) -> Any:
        raise SessionLost("the device is gone")

    core.script.on_run = lose
    assert "the device is gone" in str(outcome(core, fixed(core), "a"))


def test_sizes_that_cannot_be_zero_are_tried_as_ones(core: Any) -> None:
    def divide(name: str, inputs: Any) -> Any:
        if not np.all(inputs["IN"]):
            raise BackendError("a size is 0")
        return {"OUT": inputs["IN"]}

    core.script.on_run = divide
    assert warning(core, fixed(core, DType.INT32), "a") == ""


def test_the_parameter_warmup_allow_nan_permits_them(core: Any) -> None:
    answer(core, lambda array: np.full_like(array, np.nan))
    core.load(fixed(core, warmup=declared(), parameters={"warmup_allow_nan": "true"}))


def test_values_that_are_not_finite_in_the_sample_may_be_so_in_the_response(core: Any, tmp_path: Any) -> None:
    (tmp_path / "m" / "warmup").mkdir(parents=True)
    (tmp_path / "m" / "warmup" / "nan").write_bytes(np.array([np.nan, 0, 0, 0], np.float32).tobytes())
    sample = WarmupSample("nan", 1, (WarmupInput("IN", DType.FP32, (4,), "file", "nan"),))
    core.load(fixed(core, warmup=(sample,)), root=tmp_path)


def test_bf16_is_looked_at_bit_by_bit(core: Any) -> None:
    answer(core, lambda array: np.full_like(array, 0x7FC0))
    assert "NaN or infinity" in warning(core, fixed(core, DType.BF16), "a")
    answer(core, lambda array: np.full_like(array, 0x7F7F))
    assert warning(core, fixed(core, DType.BF16), "b") == ""


def test_integers_are_never_nan(core: Any) -> None:
    answer(core, lambda array: np.full_like(array, -1))
    core.load(fixed(core, DType.INT32))


def test_a_sound_model_that_has_no_finite_answer_to_zeros_is_served(core: Any) -> None:
    def normalise(name: str, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        with np.errstate(invalid="ignore"):
            return {"OUT": inputs["IN"] / np.linalg.norm(inputs["IN"])}

    core.script.on_run = normalise
    core.load(fixed(core))
    assert len(core.script.ran) == 2, "zeros, then random numbers"


def test_the_probe_runs_once_on_one_instance_and_is_not_counted(core: Any) -> None:
    version = core.load(fixed(core, instances=3))
    assert [rows for _, _, rows in core.script.ran] == [1]
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
def test_nothing_is_generated_for(core: Any, what: str, more: dict[str, Any]) -> None:
    core.load(core.spec(**({"inputs": (InputSpec("IN", DType.FP32, (4,)),)} | more)))
    assert core.script.ran == []


@pytest.mark.parametrize("key", ["warmup_probe", "warmup_allow_nan"])
def test_a_parameter_with_another_word_than_true_or_false_is_refused(core: Any, key: str) -> None:
    assert f"parameter {key} must be true or false" in str(outcome(core, core.spec(parameters={key: "maybe"}), "a"))


def test_a_probe_that_the_runtime_refuses_names_the_way_out(core: Any) -> None:
    def fail(name: str, inputs: Any) -> Any:
        raise ValueError("index out of range")

    core.load(fixed(core))
    core.script.on_run = fail
    said = str(outcome(core, fixed(core), "b"))
    assert "index out of range" in said
    assert "warmup_probe" in said


def test_a_probe_judges_as_the_load_did(core: Any) -> None:
    answer(core, lambda array: np.full_like(array, np.nan) if not np.any(array) else np.array(array))
    assert core.load(fixed(core)).probe(lambda run: None) > 0


def test_a_probe_of_guessed_inputs_that_do_not_suit_says_that_nothing_was_tried(core: Any) -> None:
    def refuse(name: str, inputs: Any) -> Any:
        raise BackendError(f"too small: {inputs['IN'].shape}")

    core.script.on_run = refuse
    version = core.load(core.spec(inputs=(InputSpec("IN", DType.FP32, (-1, 3)),)))
    with pytest.raises(NotWarmedUp, match=r"IN \[1, 1, 3\]; then 64 .* model_warmup .* too small: \(1, 1, 3\)"):
        version.probe(lambda run: None)
    assert [rows for _, _, rows in core.script.ran] == [1, 1], "with 1 and with 64"


def test_inputs_of_many_free_dimensions_stay_small(core: Any) -> None:
    def refuse(name: str, inputs: Any) -> Any:
        raise BackendError(f"of size {inputs['IN'].size}")

    core.script.on_run = refuse
    version = core.load(core.spec(inputs=(InputSpec("IN", DType.FP32, (-1,) * 5),)))
    with pytest.raises(NotWarmedUp, match=r"; then 16 for each dimension of any size"):
        version.probe(lambda run: None)


class EndlessSession(StreamingSession):
    """Answers until it is cancelled."""

    def steps(self, execution: Any) -> Any:
        return itertools.repeat((0.0, {"OUT": execution.request.inputs["IN"].array}))


def test_an_endless_answer_to_generated_inputs_is_cancelled(
    core: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(warmup, "_GENERATED_ANSWER_S", 0.0)
    spec = core.spec(is_decoupled=True)
    session = EndlessSession(spec, SessionInfo("stub", "CPU", "f32"))
    with pytest.raises(NotWarmedUp, match="the last response did not come within 0 s"):
        warmup.probe(session, spec, BatchPlan(spec), tmp_path)
    session.close()
