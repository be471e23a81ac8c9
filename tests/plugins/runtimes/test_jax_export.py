"""Backend jax with exported functions: names, types, variable batch sizes, and invalid files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import Backend, ModelFile, Session
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, InvalidRequest, LoadError

pytestmark = pytest.mark.full

jax = pytest.importorskip("jax", reason="jax is not installed: pip install '.[jax]'")
pytest.importorskip("jax.export")
pytest.importorskip("flatbuffers", reason="flatbuffers is not installed: pip install '.[jax]'")
Job = Callable[..., Any]
Write = Callable[..., ModelFile]


@pytest.fixture
def backend() -> Backend:
    return load_backend("jax")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(function, *shapes, **shapes)` exports a function as version 1 of a model."""

    def call(function: Callable[..., Any], *arguments: Any, platforms: Any = ("cpu",), **keywords: Any) -> ModelFile:
        exported = jax.export.export(jax.jit(function), platforms=platforms)(*arguments, **keywords)
        path = tmp_path / "made" / "1" / "model.jaxexport"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(exported.serialize())
        return ModelFile(path, path.parent.parent, 1)

    return call


@pytest.fixture
def rows() -> Any:
    return jax.export.symbolic_shape("rows")[0]


def of(dtype: str, *shape: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture
def open_session(backend: Backend, job: Job) -> Iterator[Callable[..., Session]]:
    sessions: list[Session] = []

    def call(file: ModelFile, **more: Any) -> Session:
        signature = backend.inspect(file, {})
        assert signature is not None
        session = backend.open(job(file, inputs=signature.inputs, outputs=signature.outputs, **more))
        assert isinstance(session, Session)
        sessions.append(session)
        return session

    yield call
    for session in sessions:
        session.close()


WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3)


def classify(image: Any) -> Any:
    scores = jax.nn.softmax(image @ WEIGHTS)
    return {"scores": scores, "best": scores.argmax(axis=1, keepdims=True).astype("int32")}


def test_a_symbolic_first_dimension_batches_and_names_are_the_keywords_and_keys(
    write: Write, rows: Any, backend: Backend, open_session: Any
) -> None:
    file = write(classify, image=of("float32", rows, 4))
    signature = backend.inspect(file, {})
    assert signature is not None
    assert [(one.name, one.dtype, one.dims) for one in signature.inputs] == [("image", DType.FP32, (-1, 4))]
    assert [(one.name, one.dtype, one.dims) for one in signature.outputs] == [
        ("best", DType.INT32, (-1, 1)),
        ("scores", DType.FP32, (-1, 3)),
    ]
    assert signature.is_batchable
    session = open_session(file)
    for count in (1, 3, 1, 8):
        image = np.random.default_rng(count).uniform(-1, 1, (count, 4)).astype(np.float32)
        expected = classify(image)
        found = session.run({"image": image}, ["scores", "best"])
        np.testing.assert_allclose(found["scores"], expected["scores"], rtol=1e-6)
        np.testing.assert_array_equal(found["best"], expected["best"])
    assert session.info.runtime == f"jax {jax.__version__}"
    assert (session.info.device, session.info.precision) == ("CPU", "f32")


def test_tensors_without_a_key_or_with_duplicate_names_are_named_by_position(write: Write, backend: Backend) -> None:
    def named(function: Callable[..., Any], *arguments: Any) -> tuple[list[str], list[str]]:
        signature = backend.inspect(write(function, *arguments), {})
        assert signature is not None
        return [one.name for one in signature.inputs], [one.name for one in signature.outputs]

    one = of("float32", 2)
    assert named(lambda a, b: (a, {"z": {"y": b}}), one, one) == (["INPUT__0", "INPUT__1"], ["OUTPUT__0", "z.y"])
    assert named(lambda a, b: a["x"] + b["x"], {"x": one}, {"x": one}) == (["INPUT__0", "INPUT__1"], ["OUTPUT__0"])


@pytest.mark.parametrize(
    "name", ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32",
             "float64", "bfloat16"],
)  # fmt: skip
def test_every_data_type_of_requests_is_passed_unchanged(
    name: str, write: Write, backend: Backend, open_session: Any
) -> None:
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(True):
        file = write(lambda x: x[::-1], x=of(name, 4))
    signature = backend.inspect(file, {})
    assert signature is not None
    dtype = signature.inputs[0].dtype
    values = np.array([0, 1, 1, 0] if name == "bool" else [1, 0, 3, 2**60 if name.endswith("int64") else 100])
    array = values.astype(jax.numpy.dtype(name)).view(dtype.numpy)
    found = open_session(file).run({"x": array}, ["OUTPUT__0"])["OUTPUT__0"]
    assert found.dtype == dtype.numpy
    np.testing.assert_array_equal(found, array[::-1])


def test_a_batch_that_breaks_a_constraint_of_the_function_fails_alone(
    write: Write, rows: Any, open_session: Any
) -> None:
    session = open_session(write(lambda a, b: a + b, a=of("float32", rows), b=of("float32", rows)))
    with pytest.raises(BackendError, match=r"model 'made': jax failed"):
        session.run({"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}, ["OUTPUT__0"])
    two = np.ones(2, np.float32)
    assert session.run({"a": two, "b": two}, ["OUTPUT__0"])["OUTPUT__0"].tolist() == [2, 2]


def test_an_undeclared_shape_is_a_client_error(write: Write, rows: Any, open_session: Any) -> None:
    session = open_session(write(lambda x: x + 1, x=of("float32", rows, 3)))
    with pytest.raises(
        InvalidRequest, match=r"input 'x' of model 'made' has the shape \[2, 4\], but jax accepts only \[-1, 3\]"
    ):
        session.run({"x": np.zeros((2, 4), np.float32)}, ["OUTPUT__0"])


def test_a_damaged_program_in_a_valid_file_fails_to_load(write: Write, backend: Backend, job: Job) -> None:
    file = write(lambda x: x * 2, x=of("float32", 2))
    content = bytearray(file.path.read_bytes())
    start = content.index(b"ML\xefR")
    content[start : start + 64] = bytes(64)
    file.path.write_bytes(content)
    with pytest.raises(LoadError, match=r"jax cannot load it"):
        backend.open(job(file))
    content[0] ^= 255
    file.path.write_bytes(content)
    with pytest.raises(LoadError, match=r"model 'made' version 1, file 'model\.jaxexport'"):
        backend.inspect(file, {})


def test_an_export_for_other_devices_or_types_is_refused(write: Write, backend: Backend, job: Job) -> None:
    file = write(lambda x: x, x=of("float32", 2), platforms=("cuda",))
    with pytest.raises(LoadError, match=r"exported for cuda, not for the CPU"):
        backend.inspect(file, {})
    file = write(lambda x: x, x=of("int4", 2))
    with pytest.raises(LoadError, match=r"'x' is of type int4"):
        backend.inspect(file, {})
