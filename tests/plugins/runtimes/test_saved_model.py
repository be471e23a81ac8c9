"""TensorFlow's SavedModel: run by OpenVINO from the test data, and by TensorFlow, if installed, with models made
here. tensorflow is not among the test requirements: it is large."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import Backend, ModelFile, Session
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, BackendMissing, InvalidRequest, LoadError
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions, resolve

LINEAR = Path(__file__).parents[2] / "data" / "linear.savedmodel"
FEATURES = np.array([[1, 1, 1], [0, 0, -1], [2, 0, 0.5]], np.float32)
SCORES = FEATURES @ np.array([[1, 2], [3, 4], [5, 6]], np.float32) + np.array([0.5, -0.5], np.float32)
Job = Callable[..., Any]
pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="tensorflow is not installed: pip install tensorflow (1.5 GB)",
)
has_not_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is not None, reason="tensorflow is installed"
)


@pytest.fixture
def linear(tmp_path: Path) -> ModelFile:
    path = tmp_path / "models" / "linear" / "1" / "model.savedmodel"
    shutil.copytree(LINEAR, path)
    return ModelFile(path, path.parent.parent, 1)


def opened(name: str, file: ModelFile, job: Job, **more: Any) -> Session:
    backend = load_backend(name)
    signature = backend.inspect(file, more.get("parameters", {}))
    assert signature is not None
    session = backend.open(job(file, inputs=signature.inputs, outputs=signature.outputs, **more))
    assert isinstance(session, Session)
    return session


@pytest.mark.parametrize("name", ["openvino", pytest.param("tensorflow", marks=needs_tensorflow)])
def test_a_saved_model_describes_its_tensors_and_runs(name: str, linear: ModelFile, job: Job) -> None:
    pytest.importorskip(name)
    signature = load_backend(name).inspect(linear, {})
    assert signature is not None
    assert [(one.name, one.dtype, one.dims) for one in signature.inputs] == [("features", DType.FP32, (-1, 3))]
    assert {(one.name, one.dtype, one.dims) for one in signature.outputs} == {
        ("scores", DType.FP32, (-1, 2)),
        ("best", DType.INT32, (-1, 1)),
    }
    assert signature.is_batchable
    session = opened(name, linear, job)
    for rows in (1, 3, 2):
        found = session.run({"features": FEATURES[:rows]}, ["best", "scores"])
        np.testing.assert_allclose(found["scores"], SCORES[:rows], rtol=1e-6)
        assert found["best"].tolist() == SCORES[:rows].argmax(axis=1)[:, None].tolist()
    session.close()


def test_new_weights_in_an_equal_graph_are_another_model(linear: ModelFile, job: Job) -> None:
    pytest.importorskip("openvino")
    before = opened("openvino", linear, job)
    (weights,) = linear.path.glob("variables/variables.data*")
    content = weights.read_bytes()
    place = content.index(np.array([0.5, -0.5], np.float32).tobytes())
    weights.write_bytes(content[:place] + np.array([1000, 0], np.float32).tobytes() + content[place + 8 :])
    after = opened("openvino", linear, job)
    assert after.run({"features": FEATURES}, ["scores"])["scores"][0, 0] == pytest.approx(1009)
    assert before.run({"features": FEATURES}, ["scores"])["scores"][0, 0] == pytest.approx(9.5)
    for session in (before, after):
        session.close()


@pytest.mark.parametrize("name", ["openvino", pytest.param("tensorflow", marks=needs_tensorflow)])
@pytest.mark.parametrize("damage", ["empty", "words", "cut", "gone", "a file"])
def test_an_invalid_saved_model_is_refused_with_its_name(name: str, damage: str, linear: ModelFile) -> None:
    pytest.importorskip(name)
    graph = linear.path / "saved_model.pb"
    content = graph.read_bytes()
    if damage in ("gone", "a file"):
        shutil.rmtree(linear.path)
    if damage == "a file":
        linear.path.write_bytes(content)
    elif damage != "gone":
        graph.write_bytes({"empty": b"", "words": b"no graph" * 50, "cut": content[:3000]}[damage])
    with pytest.raises(LoadError, match=r"model 'linear' version 1, file 'model\.savedmodel'"):
        load_backend(name).inspect(linear, {})


def resolved(linear: ModelFile, config: str) -> Any:
    if config:
        (linear.model_dir / "config.pbtxt").write_text(config)
    model = Scanner([linear.model_dir.parent]).find("linear")
    assert model is not None
    return resolve(model, 1, ResolveOptions())


def test_a_saved_model_without_configuration_runs_on_openvino(linear: ModelFile) -> None:
    pytest.importorskip("openvino")
    found = resolved(linear, "")
    assert found.spec.backend == "openvino"
    assert found.file.path == linear.path
    assert found.spec.max_batch_size == 4
    assert found.has_alternatives


@has_not_tensorflow
def test_without_tensorflow_its_platform_runs_on_openvino(linear: ModelFile) -> None:
    pytest.importorskip("openvino")
    spec = resolved(linear, 'platform: "tensorflow_savedmodel" max_batch_size: 8').spec
    assert (spec.backend, spec.platform) == ("openvino", "tensorflow_savedmodel")
    assert any("'tensorflow' was skipped" in note for note in spec.notes)


@has_not_tensorflow
def test_backend_tensorflow_without_the_library_names_what_to_install(linear: ModelFile) -> None:
    with pytest.raises(BackendMissing, match=r"pip install '\.\[tensorflow\]'"):
        resolved(linear, 'backend: "tensorflow"')


@pytest.fixture
def tf() -> Any:
    return pytest.importorskip("tensorflow", reason="tensorflow is not installed: pip install tensorflow (1.5 GB)")


@pytest.fixture
def backend(tf: Any) -> Backend:
    return load_backend("tensorflow")


@pytest.fixture
def save(tf: Any, tmp_path: Path) -> Callable[..., ModelFile]:
    """`save(serving_default=(function, spec, ...), other=...)` writes a SavedModel with those signatures."""

    def call(**signatures: Any) -> ModelFile:
        module = tf.Module()
        made = {}
        for name, (function, *specs) in signatures.items():
            wrapped = tf.function(function, input_signature=specs)
            setattr(module, name, wrapped)
            made[name] = wrapped
        path = tmp_path / "made" / "1" / "model.savedmodel"
        shutil.rmtree(path, ignore_errors=True)
        tf.saved_model.save(module, str(path), signatures=made)
        return ModelFile(path, path.parent.parent, 1)

    return call


@pytest.fixture
def session_of(job: Job) -> Iterator[Callable[..., Session]]:
    sessions: list[Session] = []

    def call(file: ModelFile, **more: Any) -> Session:
        sessions.append(opened("tensorflow", file, job, **more))
        return sessions[-1]

    yield call
    for session in sessions:
        session.close()


def test_the_tensorflow_platform_prefers_tensorflow(backend: Backend, linear: ModelFile) -> None:
    assert resolved(linear, 'platform: "tensorflow_savedmodel" max_batch_size: 8').spec.backend == "tensorflow"


def test_strings_are_passed_to_tensorflow_as_bytes(tf: Any, save: Any, session_of: Any) -> None:
    spec = tf.TensorSpec([None, 2], tf.string, name="words")
    session = session_of(save(serving_default=(lambda words: {"joined": tf.strings.reduce_join(words, axis=1)}, spec)))
    words = np.array([[b"\x00a", b"\xff"], [b"", "é".encode()]], dtype=object)
    found = session.run({"words": words}, ["joined"])["joined"]
    assert found.dtype == object
    assert found.tolist() == [b"\x00a\xff", "é".encode()]


@pytest.mark.parametrize(
    "name", ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32",
             "float64", "bfloat16"],
)  # fmt: skip
def test_every_data_type_of_requests_is_passed_unchanged(name: str, tf: Any, save: Any, session_of: Any) -> None:
    kind = tf.as_dtype(name)
    file = save(serving_default=(lambda x: {"y": tf.concat([x[2:], x[:2]], 0)}, tf.TensorSpec([4], kind, name="x")))
    (given,) = load_backend("tensorflow").inspect(file, {}).inputs
    values = np.array([0, 1, 1, 0] if name == "bool" else [1, 0, 3, 2**60 if name.endswith("int64") else 100])
    array = values.astype(kind.as_numpy_dtype).view(given.dtype.numpy)
    found = session_of(file).run({"x": array}, ["y"])["y"]
    assert found.dtype == given.dtype.numpy
    np.testing.assert_array_equal(found, np.roll(array, 2))


def test_another_signature_is_chosen_by_tritons_parameter(
    tf: Any, save: Any, session_of: Any, backend: Backend
) -> None:
    spec = tf.TensorSpec([None], tf.float32, name="x")
    file = save(
        serving_default=(lambda x: {"y": x + 1}, spec), negate=(lambda x: {"y": -x}, tf.TensorSpec([None], tf.float32))
    )
    assert session_of(file).run({"x": np.ones(2, np.float32)}, ["y"])["y"].tolist() == [2, 2]
    negated = session_of(file, parameters={"TF_SIGNATURE_DEF": "negate"})
    assert negated.run({"x": np.ones(2, np.float32)}, ["y"])["y"].tolist() == [-1, -1]
    with pytest.raises(LoadError, match="no signature 'sing'; there are: negate, serving_default"):
        backend.inspect(file, {"TF_SIGNATURE_DEF": "sing"})


def test_outputs_do_not_alias_input_memory(tf: Any, save: Any, session_of: Any) -> None:
    session = session_of(save(serving_default=(lambda x: {"y": tf.identity(x)}, tf.TensorSpec([4096], name="x"))))
    array = np.zeros(4096, np.float32)
    found = session.run({"x": array}, ["y"])["y"]
    array[:] = 7
    assert not found.any()
    found[0] = 1


def test_a_failing_run_is_an_error_of_the_model_and_the_next_one_works(tf: Any, save: Any, session_of: Any) -> None:
    def function(x: Any) -> dict[str, Any]:
        with tf.control_dependencies([tf.debugging.assert_less(x, 10.0, message="too hot")]):
            return {"y": tf.identity(x)}

    session = session_of(save(serving_default=(function, tf.TensorSpec([None], name="x"))))
    with pytest.raises(BackendError, match=r"model 'made': tensorflow failed: .*too hot"):
        session.run({"x": np.full(2, 99, np.float32)}, ["y"])
    assert session.run({"x": np.ones(2, np.float32)}, ["y"])["y"].tolist() == [1, 1]


def test_a_shape_that_the_signature_does_not_declare_is_the_clients_error(tf: Any, save: Any, session_of: Any) -> None:
    spec = tf.TensorSpec([None, 3], name="x")
    session = session_of(save(serving_default=(lambda x: {"y": tf.matmul(x, tf.ones([3, 2]))}, spec)))
    with pytest.raises(InvalidRequest, match=r"has the shape \[2, 4\], but tensorflow accepts only \[-1, 3\]"):
        session.run({"x": np.zeros((2, 4), np.float32)}, ["y"])


def test_instances_share_one_model_and_run_concurrently(linear: ModelFile, backend: Backend, session_of: Any) -> None:
    sessions = [session_of(linear, instances=4, number=number) for number in range(4)]

    def ask(number: int) -> bool:
        found = sessions[number].run({"features": FEATURES[: 1 + number % 3]}, ["scores"])["scores"]
        return np.allclose(found, SCORES[: 1 + number % 3])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda number: all(ask(number) for _ in range(20)), range(4)))
