"""Backend pytorch: both file formats and the rules for names. torch is too large for the test requirements."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import Backend, ModelFile, Session
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, InvalidRequest, LoadError

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch (several 100 MB)")
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]
Job = Callable[..., Any]


class Affine(torch.nn.Module):
    """(x, scale) -> (x * weight * scale, the row sums as int64)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: Any, scale: Any) -> Any:
        return x * self.weight * scale, x.sum(dim=1).to(torch.int64)


@pytest.fixture
def backend() -> Backend:
    return load_backend("pytorch")


def saved(tmp_path: Path, name: str, save: Callable[[str], object]) -> ModelFile:
    path = tmp_path / "affine" / "1" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    save(str(path))
    return ModelFile(path, path.parent.parent, 1)


@pytest.fixture
def script(tmp_path: Path) -> ModelFile:
    traced = torch.jit.trace(Affine(), (torch.ones(2, 4), torch.ones(2, 1)))
    return saved(tmp_path, "model.pt", lambda path: traced.save(path))


@pytest.fixture
def exported(tmp_path: Path) -> ModelFile:
    rows = torch.export.Dim("rows", min=1, max=64)
    shapes = {"x": {0: rows}, "scale": {0: rows}}
    program = torch.export.export(Affine(), (torch.ones(2, 4), torch.ones(2, 1)), dynamic_shapes=shapes)
    return saved(tmp_path, "model.pt2", lambda path: torch.export.save(program, path))


def opened(
    backend: Backend, job: Job, file: ModelFile, inputs: tuple[str, str], outputs: tuple[str, ...], **parameters: str
) -> Session:
    kinds = (DType.FP32, DType.INT64)
    session = backend.open(
        job(
            file,
            inputs=[InputSpec(name, DType.FP32, (size,)) for name, size in zip(inputs, (4, 1), strict=True)],
            outputs=[OutputSpec(name, kind, (-1,)) for name, kind in zip(outputs, kinds, strict=False)],
            max_batch_size=8,
            parameters=parameters,
        )
    )
    assert isinstance(session, Session)
    return session


X = np.arange(12, dtype="f4").reshape(3, 4)
SCALE = np.array([[1], [2], [3]], "f4")


@pytest.mark.parametrize("names", [("x", "scale"), ("ANY__0", "OTHER__1"), ("scale", "x")])
def test_inputs_are_named_by_argument_or_index(
    names: tuple[str, str], backend: Backend, job: Job, script: ModelFile
) -> None:
    session = opened(backend, job, script, names, ("OUT__0", "SUM__1"), INTRA_OP_THREAD_COUNT="1")
    values = (X, SCALE) if names[0] != "scale" else (SCALE, X)
    found = session.run(dict(zip(names, values, strict=True)), ["SUM__1", "OUT__0"])
    np.testing.assert_array_equal(found["OUT__0"], X * 2 * SCALE)
    np.testing.assert_array_equal(found["SUM__1"], X.sum(axis=1).astype("i8"))
    session.close()


def test_other_input_names_are_refused_with_the_arguments(backend: Backend, job: Job, script: ModelFile) -> None:
    with pytest.raises(LoadError, match=r"arguments of forward, \['x', 'scale'\], or NAME__0 to NAME__1, got"):
        opened(backend, job, script, ("left", "right"), ("OUT__0",))


def test_a_data_type_other_than_configured_is_reported(backend: Backend, job: Job, script: ModelFile) -> None:
    session = opened(backend, job, script, ("x", "scale"), ("SUM__1",))
    with pytest.raises(BackendError, match=r"expected TYPE_FP32, as configured, got torch\.int64"):
        session.run({"x": X, "scale": SCALE}, ["SUM__1"])
    session.close()


def test_an_exported_program_describes_its_tensors_and_runs(backend: Backend, job: Job, exported: ModelFile) -> None:
    signature = backend.inspect(exported, {})
    assert signature is not None
    assert signature.is_batchable
    assert [(one.name, one.dtype, one.dims) for one in signature.inputs] == [
        ("x", DType.FP32, (-1, 4)),
        ("scale", DType.FP32, (-1, 1)),
    ]
    assert [(one.name, one.dtype, one.dims) for one in signature.outputs] == [
        ("OUTPUT__0", DType.FP32, (-1, 4)),
        ("OUTPUT__1", DType.INT64, (-1,)),
    ]
    session = opened(backend, job, exported, ("x", "scale"), ("OUTPUT__0", "OUTPUT__1"))
    for rows in (3, 1):
        found = session.run({"x": X[:rows], "scale": SCALE[:rows]}, ["OUTPUT__0"])
        np.testing.assert_array_equal(found["OUTPUT__0"], X[:rows] * 2 * SCALE[:rows])
    with pytest.raises(InvalidRequest, match=r"'x' .* has the shape \[2, 3\], but pytorch accepts only \[-1, 4\]"):
        session.run({"x": X[:2, :3], "scale": SCALE[:2]}, ["OUTPUT__0"])
    assert session.info.options["format"] == "torch.export"
    session.close()


@pytest.mark.parametrize("content", [b"", b"hello world\n" * 100])
def test_a_damaged_export_is_a_load_error(
    content: bytes, backend: Backend, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = saved(tmp_path, "model.pt2", lambda path: Path(path).write_bytes(content))
    with pytest.raises(LoadError, match=r"model 'affine' version 1, file 'model\.pt2'"):
        backend.inspect(file, {})
    assert capfd.readouterr() == ("", "")


class Hostile:
    """Its pickle creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def rewrite(path: Path, change: Callable[[str, bytes], bytes]) -> None:
    """Write an archive again, with its members as `change` returns them for their names and contents."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, change(name, content))


def with_pickled_sample(name: str, content: bytes, pickled: bytes) -> bytes:
    return pickled if "/sample_inputs/" in name else content


def with_pickled_weights(name: str, content: bytes, pickled: bytes) -> bytes:
    if name.endswith("_weights_config.json"):
        return content.replace(b'"use_pickle": false', b'"use_pickle": true')
    return pickled if name.endswith("/weight_0") else content


def with_pickled_constant(name: str, content: bytes, pickled: bytes) -> bytes:
    if name.endswith("_constants_config.json"):
        meta = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
        return json.dumps({"config": {"evil": meta}}).encode()
    # The name that the configuration gives it.
    return pickled if name.endswith("/opaque_obj_0") else content


@pytest.mark.parametrize("change", [with_pickled_sample, with_pickled_weights, with_pickled_constant])
def test_an_export_with_a_pickle_that_names_functions_is_refused_and_not_unpickled(
    change: Callable[[str, bytes, bytes], bytes], backend: Backend, exported: ModelFile, tmp_path: Path
) -> None:
    marker = tmp_path / "unpickled"
    pickled = io.BytesIO()
    if change is with_pickled_constant:
        pickle.dump(Hostile(marker), pickled, protocol=2)
        with zipfile.ZipFile(exported.path, "a") as archive:
            folder = archive.namelist()[0].partition("/")[0]
            archive.writestr(f"{folder}/data/constants/opaque_obj_0", b"")
    else:
        torch.save(({"x": Hostile(marker)},), pickled)
    rewrite(exported.path, lambda name, content: change(name, content, pickled.getvalue()))
    with pytest.raises(LoadError, match=r"'[^']*' in it is a pickle that names more than tensors"):
        backend.inspect(exported, {})
    assert not marker.exists()


def test_bfloat16_is_passed_as_bit_patterns(backend: Backend, job: Job, tmp_path: Path) -> None:
    class Double(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x + x

    traced = torch.jit.trace(Double(), torch.ones(1, 4, dtype=torch.bfloat16))
    file = saved(tmp_path, "model.pt", lambda path: traced.save(path))
    session = backend.open(
        job(file, inputs=[InputSpec("x", DType.BF16, (1, 4))], outputs=[OutputSpec("y", DType.BF16, (1, 4))])
    )
    assert isinstance(session, Session)
    one, two = 0x3F80, 0x4000
    found = session.run({"x": np.full((1, 4), one, "u2")}, ["y"])["y"]
    assert (found.dtype, found.tolist()) == (np.dtype("u2"), [[two] * 4])
    session.close()


class Delay(torch.nn.Module):
    """Answers with the input of the run before."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(1 << 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.last
        self.last = x
        return before


def test_a_model_may_keep_its_input_until_the_next_run(backend: Backend, tmp_path: Path, job: Job) -> None:
    """A read-only input, as in requests, whose memory the request no longer holds. One of a megabyte is returned to
    the system at once: a later read of it crashes the process."""
    file = saved(tmp_path, "model.pt", lambda path: torch.jit.script(Delay()).save(path))
    tensors = {"inputs": [InputSpec("x", DType.FP32, (-1,))], "outputs": [OutputSpec("y", DType.FP32, (-1,))]}
    session = backend.open(job(file, **tensors))
    assert isinstance(session, Session)
    seen = []
    for number in range(4):
        given = np.full(1 << 20, number + 1, "f4")
        given.flags.writeable = False
        seen.append(session.run({"x": given}, ["y"])["y"])
        del given
    assert [set(array.tolist()) for array in seen] == [{0.0}, {1.0}, {2.0}, {3.0}]
    session.close()
