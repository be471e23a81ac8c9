"""The contract of backends/base.py, tested on each backend whose runtime imports."""

from __future__ import annotations

import gc
import resource
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from edge_server.backends import load_backend
from edge_server.backends.base import Backend, ModelFile, OpenJob, Session
from edge_server.core.model_spec import InputSpec, InstanceGroup, InstanceKind, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, BackendMissing, InvalidRequest, LoadError

FILES = {
    "onnxruntime": "onnx",
    "openvino": "onnx",
    "litert": "lite",
    "pytorch": "torch",
    "jax": "jax",
    "tensorrt_rtx": "plan",
    "stub": "onnx",
}
"""Backend -> the form of model it is shown with (conftest)."""

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

BASE_RUNTIMES = ("onnxruntime", "openvino")
"""Those of the extra `cpu`; the others run in the full part."""

RUNTIMES = [
    name if name in BASE_RUNTIMES else pytest.param(name, marks=pytest.mark.full) for name in FILES if name != "stub"
]
Open = Callable[..., Session]


DEVICES = {"tensorrt_rtx": 0}
"""Backends that run on a GPU -> its number. Where there is none, their last call is a double's (fake_gpu)."""


def backend_or_skip(name: str, request: pytest.FixtureRequest) -> Backend:
    if name in DEVICES:
        request.getfixturevalue("fake_gpu").install(request.getfixturevalue("monkeypatch"))
    try:
        return load_backend(name)
    except BackendMissing as error:
        pytest.skip(error.message)


@pytest.fixture(params=[*RUNTIMES, "stub"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return backend_or_skip(request.param, request)


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> Backend:
    return backend_or_skip(request.param, request)


def form(request: pytest.FixtureRequest) -> str:
    backend = request.getfixturevalue("runtime" if "runtime" in request.fixturenames else "backend")
    return FILES[backend.name]


@pytest.fixture
def add_sub_file(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"add_sub_{form(request)}")
    return path


@pytest.fixture
def slow_file(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"slow_{form(request)}")
    return path


def model_file(path: Path) -> ModelFile:
    return ModelFile(path, path.parent.parent, int(path.parent.name))


def add_sub_spec(backend: str, instances: int = 1, **parameters: str) -> ModelSpec:
    return ModelSpec(
        name="add_sub",
        backend=backend,
        platform="",
        max_batch_size=8,
        inputs=tuple(InputSpec(name, DType.FP32, (16,)) for name in ("INPUT0", "INPUT1")),
        outputs=tuple(OutputSpec(name, DType.FP32, (16,)) for name in ("OUTPUT0", "OUTPUT1")),
        instance_groups=(InstanceGroup("add_sub", InstanceKind.CPU, instances),),
        parameters={"stub_op": "add_sub", **parameters},
    )


@pytest.fixture
def open_add_sub(backend: Backend, add_sub_file: Path) -> Open:
    def open_it(instance: int = 0, instances: int = 1, **parameters: str) -> Session:
        spec = add_sub_spec(backend.name, instances, **parameters)
        session = backend.open(
            OpenJob(spec, model_file(add_sub_file), f"add_sub_{instance}", DEVICES.get(backend.name))
        )
        assert isinstance(session, Session)
        return session

    return open_it


def rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal((count, 16), dtype="f4") for name in ("INPUT0", "INPUT1")}


BOTH = ("OUTPUT0", "OUTPUT1")


def check(inputs: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> None:
    np.testing.assert_allclose(found["OUTPUT0"], inputs["INPUT0"] + inputs["INPUT1"], rtol=1e-6)
    np.testing.assert_allclose(found["OUTPUT1"], inputs["INPUT0"] - inputs["INPUT1"], rtol=1e-6)


def test_each_item_of_a_batch_of_any_size_is_computed(open_add_sub: Open) -> None:
    session = open_add_sub()
    for count in (1, 3, 8, 2):
        inputs = rows(count)
        check(inputs, dict(session.run(inputs, BOTH)))
    session.close()


def test_only_the_named_outputs_are_returned(open_add_sub: Open) -> None:
    session = open_add_sub()
    inputs = rows(2)
    found = session.run(inputs, ["OUTPUT1"])
    assert list(found) == ["OUTPUT1"]
    np.testing.assert_allclose(found["OUTPUT1"], inputs["INPUT0"] - inputs["INPUT1"], rtol=1e-6)
    session.close()


def test_outputs_belong_to_the_caller_even_after_the_session_is_closed(open_add_sub: Open) -> None:
    session = open_add_sub()
    inputs = rows(2, seed=1)
    first = dict(session.run(inputs, BOTH))
    session.run(rows(2, seed=2), BOTH)
    session.close()
    check(inputs, first)
    for array in first.values():
        array[:] = 0
        assert not any(np.shares_memory(array, given) for given in inputs.values())


def test_read_only_unaligned_and_strided_inputs_are_read_and_not_changed(open_add_sub: Open) -> None:
    session = open_add_sub()
    expected = rows(2)
    body = b"x" + expected["INPUT0"].tobytes()
    unaligned = np.frombuffer(body, dtype="u1")[1:].view("f4").reshape(2, 16)
    wide = np.zeros((2, 32), dtype="f4")
    strided = wide[:, ::2]
    strided[:] = expected["INPUT1"]
    read_only = np.frombuffer(expected["INPUT0"].tobytes(), dtype="f4").reshape(2, 16)
    for array in (unaligned, read_only):
        assert not array.flags.writeable
        check(expected, dict(session.run({"INPUT0": array, "INPUT1": strided}, BOTH)))
        np.testing.assert_array_equal(array, expected["INPUT0"])
    assert body == b"x" + expected["INPUT0"].tobytes()
    session.close()


GIVES_BACK_LATER = {"jax"}
"""Backends whose runtime gives up an aligned input only when the interpreter collects garbage, or at its next call."""


def test_no_reference_to_an_input_is_kept(open_add_sub: Open, backend: Backend) -> None:
    session = open_add_sub()
    inputs = rows(2)
    before = [sys.getrefcount(array) for array in inputs.values()]
    session.run(inputs, BOTH)
    if backend.name in GIVES_BACK_LATER:
        gc.collect()
    assert [sys.getrefcount(array) for array in inputs.values()] == before
    session.close()


def test_a_failed_run_names_the_model_and_leaves_the_session_usable(
    open_add_sub: Open, backend: Backend, capfd: pytest.CaptureFixture[str]
) -> None:
    session = open_add_sub()
    wrong = {"INPUT0": np.zeros((2, 16), dtype="f4"), "INPUT1": np.zeros((2, 3), dtype="f4")}
    # The others know the shapes that the file accepts, so that the error is the client's: 400, not 500.
    kind = BackendError if backend.name in ("pytorch", "stub") else InvalidRequest
    with pytest.raises(kind, match="model 'add_sub'") as caught:
        session.run(wrong, BOTH)
    assert "\n" not in caught.value.message
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert capfd.readouterr() == ("", "")
    inputs = rows(1)
    check(inputs, dict(session.run(inputs, BOTH)))
    session.close()


def test_a_runtime_without_side_effects_says_so(open_add_sub: Open, backend: Backend) -> None:
    session = open_add_sub()
    assert session.is_repeatable == (backend.name in ("onnxruntime", "openvino", "tensorrt_rtx"))
    session.close()


def test_instances_run_in_parallel_without_mixing_outputs(open_add_sub: Open) -> None:
    sessions = [open_add_sub(number, instances=3) for number in range(3)]

    def work(number: int) -> None:
        for turn in range(60):
            inputs = rows(1 + turn % 4, seed=1000 * number + turn)
            check(inputs, dict(sessions[number].run(inputs, BOTH)))

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(work, number) for number in range(3)]:
            future.result()
    for session in sessions:
        session.close()


def test_closing_one_instance_leaves_the_others_running(open_add_sub: Open) -> None:
    first, second = open_add_sub(0, instances=2), open_add_sub(1, instances=2)
    first.close()
    inputs = rows(2)
    check(inputs, dict(second.run(inputs, BOTH)))
    second.close()


def test_instances_may_be_opened_on_many_threads_at_once(open_add_sub: Open) -> None:
    with ThreadPoolExecutor(4) as pool:
        sessions = list(pool.map(lambda number: open_add_sub(number, instances=4), range(4)))
    for session in sessions:
        inputs = rows(1)
        check(inputs, dict(session.run(inputs, BOTH)))
        session.close()


def test_a_session_reports_the_options_in_force(open_add_sub: Open) -> None:
    session = open_add_sub()
    assert session.info.runtime
    is_gpu = session.info.runtime.startswith("tensorrt")
    assert session.info.device == ("GPU:0" if is_gpu else "CPU")
    assert session.info.precision == ("as the model says" if is_gpu else "f32")
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in session.info.options.items())
    session.close()


def test_the_gil_is_released_while_the_runtime_computes(runtime: Backend, slow_file: Path) -> None:
    spec = ModelSpec(
        name="slow",
        backend=runtime.name,
        platform="",
        max_batch_size=0,
        inputs=(InputSpec("X", DType.FP32, (1, 1)),),
        outputs=(OutputSpec("Y", DType.FP32, (1, 1)),),
        instance_groups=(InstanceGroup("slow", InstanceKind.CPU, 1),),
    )
    session = runtime.open(OpenJob(spec, model_file(slow_file), "slow_0", DEVICES.get(runtime.name)))
    assert isinstance(session, Session)
    go, progress = threading.Event(), []
    other = threading.Thread(target=lambda: (go.wait(), progress.append(1)))
    other.start()
    interval = sys.getswitchinterval()
    # The interpreter now never switches threads by itself: the other thread runs only if the run releases the GIL.
    sys.setswitchinterval(1000)
    try:
        go.set()
        session.run({"X": np.zeros((1, 1), dtype="f4")}, ["Y"])
        seen = list(progress)
    finally:
        sys.setswitchinterval(interval)
        other.join()
        session.close()
    assert seen == [1]


def test_the_signature_is_read_from_the_file(runtime: Backend, add_sub_file: Path) -> None:
    signature = runtime.inspect(model_file(add_sub_file), {})
    if runtime.name == "pytorch":
        assert signature is None, "TorchScript does not tell"
        return
    assert signature is not None
    assert [(one.name, one.dtype, one.dims) for one in signature.inputs] == [
        ("INPUT0", DType.FP32, (-1, 16)),
        ("INPUT1", DType.FP32, (-1, 16)),
    ]
    assert {(one.name, one.dtype, one.dims) for one in signature.outputs} == {
        ("OUTPUT0", DType.FP32, (-1, 16)),
        ("OUTPUT1", DType.FP32, (-1, 16)),
    }
    assert signature.is_batchable


def test_a_model_with_a_fixed_first_dimension_does_not_batch(runtime: Backend, slow_file: Path) -> None:
    signature = runtime.inspect(model_file(slow_file), {})
    if runtime.name == "pytorch":
        assert signature is None, "TorchScript does not tell"
        return
    assert signature is not None
    assert not signature.is_batchable
    assert [one.dims for one in signature.inputs] == [(1, 1)]


def damage(kind: str, path: Path, good: Path) -> None:
    whole = good.read_bytes()
    if kind == "empty":
        path.touch()
    elif kind == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif kind == "garbage":
        path.write_bytes(b"hello world\n" * 1000)
    elif kind == "huge garbage":
        path.write_bytes(np.random.default_rng(0).bytes(30_000_000))
    elif kind == "directory without a model":
        path.mkdir()


DAMAGE = ("missing", "empty", "truncated", "garbage", "huge garbage", "directory without a model")


@pytest.mark.sample
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_a_load_error_in_one_line_and_nothing_is_printed(
    kind: str, runtime: Backend, add_sub_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken" / "3" / add_sub_file.name
    path.parent.mkdir(parents=True)
    damage(kind, path, add_sub_file)
    job = OpenJob(add_sub_spec(runtime.name), model_file(path), "broken_0", DEVICES.get(runtime.name))
    for attempt in (lambda: runtime.inspect(model_file(path), {}), lambda: runtime.open(job)):
        with pytest.raises(LoadError) as caught:
            attempt()
        message = caught.value.message
        assert "model 'broken' version 3" in message
        assert path.name in message
        assert "\n" not in message
        assert len(message) < 1000
    assert capfd.readouterr() == ("", "")


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts resident pages through /proc")
def test_memory_stays_flat_over_a_hundred_loads(open_add_sub: Open) -> None:
    def cycle(count: int) -> None:
        for _ in range(count):
            session = open_add_sub()
            session.run(rows(4), BOTH)
            session.close()

    cycle(20)
    before = resident_bytes()
    cycle(100)
    # Losing the 4 MB of weights even every tenth time would show.
    assert resident_bytes() - before < 32_000_000


BOUND = {"tensorrt_rtx"}
"""Backends of sessions that are bound to a thread: it holds a CUDA context."""


MAY_WAIT = {"tensorflow"}
"""Backends whose runs may wait for something without end: a graph may have operations that read."""


def test_a_session_reports_whether_its_runs_only_compute(open_add_sub: Open, backend: Backend) -> None:
    session = open_add_sub()
    session.close()
    assert session.info.only_computes == (backend.name not in MAY_WAIT)
    assert not session.info.keeps_thread


def test_a_session_reports_whether_it_is_bound_to_a_thread(open_add_sub: Open, backend: Backend) -> None:
    session = open_add_sub()
    session.close()
    assert session.info.is_bound == (backend.name in BOUND)
    if session.info.is_bound:
        return

    def on_another_thread(work: Callable[[], object]) -> object:
        # A thread of its own each time, that ends with the call.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()

    session = on_another_thread(open_add_sub)
    assert isinstance(session, Session)
    for count in (1, 3):
        inputs = rows(count)
        check(inputs, dict(on_another_thread(lambda: session.run(inputs, BOTH))))  # type: ignore[call-overload]  # noqa: B023
    on_another_thread(session.close)
