"""Backend c_abi: the example library, and libraries that break the rules of the header."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_server.plugins.runtimes.c_library
from edge_server.backends import load_backend
from edge_server.backends.base import Backend, ModelFile, Session
from edge_server.core.batch import BatchPlan
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.request_response import Request
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError, LoadError
from edge_server.plugins.runtimes.c_library.structs import ABI_VERSION

SOURCES = Path(__file__).parent / "c_backend"
HEADER = Path(edge_server.plugins.runtimes.c_library.__file__).parent / "edge_backend.h"
OTHER_FOLDER = Path(edge_server.__file__).parent / "backends"
"""It has the header too: builds with its path go on."""
STRICT = ("-Wall", "-Wextra", "-Werror")
Job = Callable[..., Any]
X = InputSpec("X", DType.INT32, (-1,))
Y = OutputSpec("Y", DType.INT32, (-1,))


def compiled(compiler: str, source: str, target: Path, *flags: str) -> Path:
    found = shutil.which(compiler)
    if found is None:
        pytest.skip(f"there is no {compiler} to build a library with")
    command = [found, "-shared", "-fPIC", "-O0", *STRICT, f"-I{HEADER.parent}", *flags, "-o", target, SOURCES / source]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("g++", "moving_average.cpp", tmp_path_factory.mktemp("library") / "libmodel.so", "-std=c++17")


@pytest.fixture(scope="session")
def unruly(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`unruly("VERSION")`: the library that breaks that rule; NONE breaks none until it runs."""
    folder, built = tmp_path_factory.mktemp("libraries"), {}

    def build(rule: str) -> Path:
        if rule not in built:
            built[rule] = compiled("cc", "unruly.c", folder / f"{rule}.so", f"-DRULE={rule}", "-pthread")
        return built[rule]

    return build


@pytest.fixture
def backend() -> Backend:
    return load_backend("c_abi")


@pytest.fixture
def model(tmp_path: Path) -> Callable[[Path], ModelFile]:
    def call(library: Path) -> ModelFile:
        path = tmp_path / "made" / "1" / "libmodel.so"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, path)
        return ModelFile(path, path.parent.parent, 1)

    return call


def opened(backend: Backend, job: Any) -> Session:
    session = backend.open(job)
    assert isinstance(session, Session)
    return session


@pytest.mark.parametrize("folder", [HEADER.parent, OTHER_FOLDER])
def test_the_header_compiles_as_c_and_cpp_and_has_the_supported_version(folder: Path, tmp_path: Path) -> None:
    assert f"#define EDGE_BACKEND_ABI_VERSION {ABI_VERSION}u" in HEADER.read_text()
    for compiler, standard in (("cc", "-std=c99"), ("g++", "-std=c++11")):
        found = shutil.which(compiler)
        if found is None:
            pytest.skip(f"there is no {compiler}")
        source = tmp_path / ("only.c" if compiler == "cc" else "only.cpp")
        source.write_text('#include "edge_backend.h"\nuint32_t version = EDGE_BACKEND_ABI_VERSION;\n')
        command = [found, standard, "-pedantic", *STRICT, f"-I{folder}", "-fsyntax-only", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_type_codes_equal_those_of_the_header() -> None:
    text = HEADER.read_text()
    for dtype in DType:
        assert f"EDGE_{dtype.value} = {dtype.number}" in text


def test_the_example_describes_itself(backend: Backend, example: Path, model: Any) -> None:
    signature = backend.inspect(model(example), {})
    assert signature is not None
    assert signature.inputs == (InputSpec("SIGNAL", DType.FP32, (-1, -1)), InputSpec("NAME", DType.BYTES, (-1, 1)))
    assert signature.outputs == (OutputSpec("SMOOTH", DType.FP32, (-1, -1)), OutputSpec("TAG", DType.BYTES, (-1, 1)))
    assert signature.is_batchable


def test_the_example_computes_what_numpy_computes_with_its_parameters(
    backend: Backend, example: Path, model: Any, job: Job
) -> None:
    file = model(example)
    signature = backend.inspect(file, {})
    assert signature is not None
    specs = {"inputs": signature.inputs, "outputs": signature.outputs}
    session = opened(backend, job(file, **specs, parameters={"window": "3"}, settings={"suffix": "é!"}))
    values = np.random.default_rng(0).integers(0, 99, (4, 10)).astype(np.float32)
    expected = [[row[max(0, i - 2) : i + 1].mean() for i in range(10)] for row in values]
    names = np.array([[b""], [b"a"], [b"\x00\xff"], [b"x" * 5000]], dtype=object)
    given = {"SIGNAL": np.asfortranarray(values), "NAME": names}
    found = session.run(given, ["SMOOTH", "TAG"])
    np.testing.assert_allclose(found["SMOOTH"], expected, rtol=1e-6)
    assert found["TAG"].tolist() == [[name + "é!".encode()] for (name,) in names.tolist()]
    assert list(session.run(given, ["TAG"])) == ["TAG"]
    session.close()
    with pytest.raises(LoadError, match=r"model 'made'.*edge_model_open failed: parameter window must be"):
        backend.open(job(file, **specs, parameters={"window": "0"}))


def test_a_thrown_exception_is_reported_by_its_message(backend: Backend, example: Path, model: Any, job: Job) -> None:
    session = opened(backend, job(model(example), inputs=[InputSpec("NAME", DType.BYTES, (-1, 1))]))
    with pytest.raises(BackendError, match="model 'made': edge_model_run failed: input SIGNAL is missing"):
        session.run({"NAME": np.array([[b"a"]], dtype=object)}, ["SMOOTH"])
    session.close()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("VERSION", "built for version 7 of edge_backend.h, not 1"),
        ("NO_RUN", "lacks edge_model_run"),
        ("NO_HANDLE", "it gave no handle"),
        ("OPEN_FAILS", "edge_model_open failed: xxxx"),
        ("DESCRIBE_FAILS", "edge_model_describe failed: code 3, without a reason"),
        ("NO_LIST", "1 inputs and gives no such list"),
        ("BAD_TYPE", "'X' with datatype 99"),
        ("BAD_RANK", "rank 4000000"),
    ],
)
def test_a_library_that_breaks_the_interface_is_not_loaded(
    rule: str, message: str, backend: Backend, unruly: Any, model: Any
) -> None:
    with pytest.raises(LoadError) as refused:
        backend.inspect(model(unruly(rule)), {})
    assert message in refused.value.message
    assert "model 'made' version 1, file 'libmodel.so'" in refused.value.message


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("fails", "the sensor is dark"),
        ("silent", "code 42, without a reason"),
        ("unknown", "output 'Z', which is not asked for"),
        ("nameless", "output '', which is not asked for"),
        ("twice", "output 'Y', which is not asked for or was allocated before"),
        ("type", "output 'Y' the datatype 99"),
        ("rank", "the rank -1"),
        ("no dims", "the datatype 8 and the rank 1"),
        ("minus", "16 bytes for INT32 [-4]"),
        ("short", "12 bytes for INT32 [4]"),
        ("huge", "no memory for the 4611686018427387904 bytes"),
        ("strings", "the 6 bytes of output 'Y' are not the 1 strings"),
        ("crowd", f"the 8 bytes of output 'Y' are not the {2**60} strings"),
    ],
)
def test_a_failing_or_invalid_run_has_its_reason_and_the_next_one_works(
    mode: str, message: str, backend: Backend, unruly: Any, model: Any, job: Job
) -> None:
    file = model(unruly("NONE"))
    session = opened(backend, job(file, inputs=[X], outputs=[Y], parameters={"mode": mode}))
    for _ in range(2):
        with pytest.raises(BackendError) as failed:
            session.run({"X": np.arange(3, dtype=np.int32)}, ["Y"])
        assert "model 'made': edge_model_run failed" in failed.value.message
        assert message in failed.value.message
    session.close()


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("missing", "did not answer output 'Y'"),
        ("longer", r"shape \[4\], but its configuration promises \[3\]"),
        ("wider", r"shape \[3, 1\], but its configuration promises \[3\]"),
        ("floats", "type float32, but its configuration promises INT32"),
    ],
)
def test_outputs_of_another_shape_or_type_than_configured_are_refused(
    mode: str, message: str, backend: Backend, unruly: Any, model: Any, job: Job
) -> None:
    item, made = InputSpec("X", DType.INT32, ()), OutputSpec("Y", DType.INT32, ())
    one = job(model(unruly("NONE")), inputs=[item], outputs=[made], parameters={"mode": mode}, max_batch_size=8)
    session, plan = opened(backend, one), BatchPlan(one.spec)
    request = Request("made", {"X": Tensor("X", DType.INT32, np.arange(3, dtype=np.int32))})
    with pytest.raises(BackendError, match=message):
        plan.scatter(session.run(plan.gather([request]), ["Y"]), [request], [3])
    session.close()


def test_unwritten_output_memory_contains_no_foreign_data(backend: Backend, unruly: Any, model: Any, job: Job) -> None:
    session = opened(backend, job(model(unruly("NONE")), inputs=[X], parameters={"mode": "unwritten"}))
    assert not session.run({"X": np.full(100_000, 7, np.int32)}, ["Y"])["Y"].any()
    session.close()


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_outputs_of_any_size_belong_to_the_caller(
    size: int, backend: Backend, unruly: Any, model: Any, job: Job
) -> None:
    session = opened(backend, job(model(unruly("NONE")), inputs=[X]))
    given = np.arange(size, dtype=np.int32)
    given.flags.writeable = False
    found = session.run({"X": given}, ["Y"])["Y"]
    session.close()
    np.testing.assert_array_equal(found, given)
    assert found.flags.writeable


def test_instances_run_in_the_library_concurrently(backend: Backend, unruly: Any, model: Any, job: Job) -> None:
    file = model(unruly("NONE"))
    sessions = [opened(backend, job(file, inputs=[X], parameters={"mode": "meet"}, number=n)) for n in range(2)]
    with ThreadPoolExecutor(2) as pool:
        # Either waits inside for the other, which would be for ever if one held the interpreter's lock.
        found = list(pool.map(lambda one: one.run({"X": np.arange(3, dtype=np.int32)}, ["Y"])["Y"].tolist(), sessions))
    assert found == [[0, 1, 2]] * 2
    for session in sessions:
        session.close()


def test_overwriting_a_library_does_not_change_the_loaded_one(
    backend: Backend, unruly: Any, example: Path, model: Any, job: Job
) -> None:
    file = model(unruly("NONE"))
    session = opened(backend, job(file, inputs=[X]))
    with open(file.path, "r+b") as content:
        content.truncate(100)
    assert session.run({"X": np.arange(3, dtype=np.int32)}, ["Y"])["Y"].tolist() == [0, 1, 2]
    with open(file.path, "wb") as content:
        content.write(example.read_bytes())
    signature = backend.inspect(file, {})
    assert signature is not None
    assert [one.name for one in signature.inputs] == ["SIGNAL", "NAME"]
    session.close()


def mapped_copies() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "edge-c-abi-" in line]


def test_a_library_is_unloaded_with_its_last_instance(backend: Backend, unruly: Any, model: Any, job: Job) -> None:
    file = model(unruly("NONE"))
    before = len(mapped_copies())
    first, second = (opened(backend, job(file, inputs=[X], number=number)) for number in range(2))
    one_library = len(mapped_copies()) - before
    assert one_library > 0
    first.close()
    assert len(mapped_copies()) - before == one_library
    second.close()
    assert len(mapped_copies()) == before


@pytest.mark.parametrize("content", [b"", b"not a library", b"\x7fELF" + bytes(500)])
def test_a_file_that_is_no_library_is_refused(content: bytes, backend: Backend, model: Any, example: Path) -> None:
    file = model(example)
    file.path.write_bytes(content)
    with pytest.raises(LoadError, match=r"model 'made' version 1, file 'libmodel\.so'"):
        backend.inspect(file, {})
