"""The adapter and the double against NVIDIA's real Python bindings, over libraries whose functions do nothing.

`fetch_bindings.sh` fetches the bindings and compiles the libraries. Nothing here has run on a GPU. What is shown: every
call has a name, arguments and types that the binding takes, and that TensorRT can call our classes.
"""

from __future__ import annotations

import ast
import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edge_server.backends.base import ModelFile

pytestmark = pytest.mark.full

HERE = Path(__file__).parent
FOLDER = os.environ.get("EDGE_TEST_TENSORRT_BINDINGS", "")
VERSIONS = ("8.6.1", "10.3.0", "10.13.3.9", "11.4.0.106")
LEAN = "lean-11.4.0.106"
"""The lean runtime, whose folder has no `tensorrt`."""

CLASSIFIER = HERE.parents[2] / "model_repository" / "efficientnet_lite0" / "1" / "model.onnx"

PRELUDE = """
import ctypes, sys
from edge_server.plugins.tensorrt import library_adapter
name = sys.argv[1]
library = library_adapter.load_library(name)
trt = library.trt
"""


def run(version: str, script: str, *arguments: str, **environment: str) -> str:
    """Return what a child process prints that has the bindings of one version."""
    if not FOLDER:
        pytest.skip("needs NVIDIA's bindings: tests/plugins/tensorrt/fetch_bindings.sh")
    if not (Path(FOLDER) / version).is_dir():
        pytest.skip(f"there is no wheel of TensorRT's bindings {version} for Python {sys.version_info[:2]}")
    stub = f"{FOLDER}/stub/{version.removeprefix('lean-').partition('.')[0]}"
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, "tensorrt", *arguments],
        env={**os.environ, "LD_LIBRARY_PATH": stub, "PYTHONPATH": f"{FOLDER}/{version}", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


EXECUTES = """
from types import SimpleNamespace
from edge_server.plugins.tensorrt.execution_context import ExecutionContext
library.load_plugins(("/plugin.so",))
engine = library.deserialise(b"plan")
(tensor,) = library.tensors(engine)
assert (tensor.name, tensor.is_input) == ("x", True), tensor
shape = (0, 3) if library.major < 10 else (3, 4)
assert tensor.shape == shape, tensor
assert library.profiles(engine, ()) == ({},)
assert set(library.value_profiles(engine, (tensor,))[0]) == (set() if library.major < 10 else {"x"})
assert len(engine.get_tensor_profile_shape("x", 0)) == 3
assert library.scratch_bytes(engine) > 0
allocator = library.make_output_allocator(lambda size: 0, lambda shape: None)
buffer = SimpleNamespace(address=0x10000)
bindings = SimpleNamespace(
    inputs={"x": tensor}, outputs={"x": tensor}, buffers={"x": buffer}, dynamic_outputs={"x": (None, allocator)}
)
for has_own_memory in (True, False):
    execution = ExecutionContext(library, engine, bindings, 0x20000, 2, has_own_memory=has_own_memory)
    if not has_own_memory:
        library.set_context_memory(execution.context, 0x30000, 4096)
    execution.use_profile(1)
    assert execution.context.set_input_shape("x", (3, 4))
    assert isinstance(execution.context.infer_shapes(), list)
    execution.set_addresses()
    execution.execute()
    assert execution.output_shapes() == {"x": shape}
"""


@pytest.mark.parametrize("version", [*VERSIONS, LEAN])
def test_every_call_that_opens_and_runs_an_engine_is_one_of_the_bindings(version: str) -> None:
    run(version, EXECUTES)


BUILDS = """
from pathlib import Path
from edge_server.plugins.tensorrt.builds import onnx_to_engine
from edge_server.plugins.tensorrt.engine_order import EngineOrder, Range
builder = trt.Builder(library.logger)
network = library.make_network(builder)
parser = trt.OnnxParser(network, library.logger)
assert parser.parse_from_file("/model.onnx")
assert parser.num_errors
config = builder.create_builder_config()
environment = onnx_to_engine.BuildEnvironment(Path("/none"), (8, 7), Path("/none"), 1 << 20)
options = {"trt_max_workspace_size": "1000", "trt_builder_optimization_level": "3"}
dla = {"trt_dla_enable": "1", "trt_dla_core": "0"}
shapes = ({"x": Range((1,), (2,), (3,))},)
for precision, more in (("fp32", {}), ("fp16", dla), ("int8", {}), ("best", {})):
    order = EngineOrder("m", 1, Path(sys.argv[2]), name, library.version, 0, precision, shapes, options | more)
    onnx_to_engine._configure(config, order, environment, library)
try:
    # The number of the profile that was added is always 1 here; the first must be 0.
    onnx_to_engine._add_profiles(builder, network, config, order, library)
except onnx_to_engine.BuildFault as fault:
    assert "profile 0 does not fit" in str(fault), fault
builder.create_optimization_profile().set_shape("x", (1,), (2,), (3,))
assert onnx_to_engine._load_timing_cache(config, environment, library)
onnx_to_engine._add_progress_monitor(trt, config, lambda phase, percent: None, lambda: False)
assert builder.build_serialized_network(network, config) is not None
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_every_call_that_builds_an_engine_is_one_of_the_bindings(version: str) -> None:
    run(version, BUILDS, str(CLASSIFIER))


def test_the_hardware_tests_build_their_plans_with_calls_of_the_bindings() -> None:
    """TensorRT for RTX is real and builds them, without a GPU."""
    script = (
        f"sys.path.insert(0, {str(HERE.parents[2] / 'hil_tests')!r})\n"
        "from test_tensorrt_shape_tensors import LARGE, SMALL, build_plan\n"
        "print(build_plan(name, SMALL, LARGE).nbytes > 1000)"
    )
    for version in VERSIONS:
        run(version, script.replace(".nbytes > 1000", " is not None"))
    done = subprocess.run([sys.executable, "-c", PRELUDE + script, "tensorrt_rtx"], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


# An object of pybind11 holds the pointer to the C++ object behind its head of 16 bytes; that one begins with its table
# of virtual functions. Since 10 the table begins with four functions of all interfaces, since 11 also a logger's.
CALLED = """
def virtual(python_object, number, result, *arguments):
    value = ctypes.c_void_p.from_address(id(python_object) + 16).value
    table = ctypes.c_void_p.from_address(value).value
    address = ctypes.c_void_p.from_address(table + 8 * number).value
    return lambda *given: ctypes.CFUNCTYPE(result, ctypes.c_void_p, *arguments)(address)(value, *given)

TEXT, POINTER, SIZE, NUMBER = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int32
is_new = library.major >= 10
calls = []
allocator = library.make_output_allocator(lambda size: calls.append(size) or 0xABC000, calls.append)
allocate = virtual(allocator, 4 if is_new else 1, POINTER, TEXT, POINTER, SIZE, SIZE)
assert allocate(b"out", None, 400, 256) == 0xABC000
assert allocate(b"out", 0x7000, 500, 256) == 0xABC000
if is_new:
    allocate_later = virtual(allocator, 5, POINTER, TEXT, POINTER, SIZE, SIZE, POINTER)
    assert allocate_later(b"out", None, 600, 256, 0x55) == 0xABC000
Size = ctypes.c_int64 if is_new else ctypes.c_int32
class Dims(ctypes.Structure):
    _fields_ = [("count", NUMBER), ("sizes", Size * 8)]
dims = Dims(2, (Size * 8)(3, 5))
virtual(allocator, 6 if is_new else 2, None, TEXT, POINTER)(b"out", ctypes.addressof(dims))
assert calls == [400, 500, *([600] if is_new else []), (3, 5)], calls
without = library.make_output_allocator(lambda size: 0, calls.append)
assert virtual(without, 4 if is_new else 1, POINTER, TEXT, POINTER, SIZE, SIZE)(b"out", None, 1, 256) is None

with library.logger.captured() as errors:
    log = virtual(library.logger, 4 if library.major >= 11 else 0, None, NUMBER, TEXT)
    for severity, text in enumerate((b"a bug", b"two\\n lines", b"a warning", b"a note")):
        log(severity, text)
assert errors.text() == "a bug; two lines", errors.text()

if is_new and hasattr(trt, "Builder"):
    from edge_server.plugins.tensorrt.builds import onnx_to_engine
    reports, cancelled = [], []
    class Config:
        pass
    onnx_to_engine._add_progress_monitor(trt, Config, lambda *report: reports.append(report), lambda: bool(cancelled))
    monitor = Config.progress_monitor
    virtual(monitor, 4, None, TEXT, TEXT, NUMBER)(b"all", None, 4)
    step = virtual(monitor, 5, ctypes.c_bool, TEXT, NUMBER)
    assert step(b"all", 1) is True
    cancelled.append(1)
    assert step(b"all", 2) is False
    virtual(monitor, 6, None, TEXT)(b"all")
    assert reports[0] == ("all", 0.0), reports
"""


@pytest.mark.parametrize("version", [*VERSIONS, LEAN])
def test_tensorrt_can_call_the_allocator_the_logger_and_the_monitor(version: str) -> None:
    run(version, CALLED)


OLD_DRIVER = "CUDA initialization failure with error: 35. Please check your CUDA installation"
"""What TensorRT 8 and later log as a warning before their factories return nothing."""

STARTS = """
from edge_server.plugins.tensorrt.library_adapter import EngineFault
try:
    library.deserialise(b"plan")
except EngineFault as fault:
    print(fault)
"""

BUILDS_IN_CHILD = """
import json, os
from pathlib import Path
from edge_server.plugins.tensorrt.builds.build_process import Bounds, BuildControl, build_job, run_child
from edge_server.plugins.tensorrt.engine_order import EngineOrder
order = EngineOrder("m", 1, Path(sys.argv[2]), name, library.version, 0, "fp32", ())
control = BuildControl(lambda: "", lambda: "", lambda phase, percent: None, lambda why: None)
outcome = run_child(build_job(order, Path("/none"), Path("/none"), None), Bounds(60.0), control)
print(outcome.end, outcome.is_final, outcome.reason)
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_a_tensorrt_that_does_not_start_is_reported_with_its_own_line_and_the_cure(version: str) -> None:
    words = (
        rf"tensorrt {re.escape(version)} does not start: the driver is older .* \(it logged: {re.escape(OLD_DRIVER)}\)"
    )
    assert re.fullmatch(words, run(version, STARTS, STUB_LOG=OLD_DRIVER).strip())
    told = run(version, BUILDS_IN_CHILD, str(CLASSIFIER), STUB_LOG=OLD_DRIVER).strip()
    assert re.fullmatch(f"failed True {words}", told)


def test_without_a_code_in_its_line_the_report_has_the_line_alone() -> None:
    expected = "tensorrt 11.4.0.106 does not start: it logged: Unable to load library: libnvinfer_builder_resource"
    line = "Unable to load library: libnvinfer_builder_resource"
    assert run("11.4.0.106", STARTS, STUB_LOG=line).strip() == expected


OLD = "the driver is older than the CUDA of the library that uses it"


@pytest.mark.parametrize(
    ("driver", "code", "cause"),
    [
        ({"FAKE_CUDA_VERSION": "12020"}, 35, OLD),
        ({"FAKE_CUDA_INIT": "801"}, 801, "on a Jetson, the server's user may not open the GPU's files"),
        ({"FAKE_CUDA_INIT": "999"}, 999, "the kernel module nvidia-uvm is not loaded"),
        ({"FAKE_CUDA_INIT": "803"}, 803, "the driver's kernel module and its library have different versions"),
        ({"FAKE_CUDA_INIT": "400"}, 400, ""),
    ],
)
def test_the_real_lean_runtime_that_does_not_start_is_reported_and_does_not_end_the_process(
    fake_gpu: Any, driver: dict[str, str], code: int, cause: str
) -> None:
    """In place of an object, its factory returns an address that is none, which pybind11 takes for a Runtime."""
    said = run(LEAN, STARTS * 2, LD_LIBRARY_PATH=real_lean(fake_gpu), **driver).splitlines()
    line = rf"createInferRuntime: .*CUDA initialization failure with error: {code} .*"
    assert re.fullmatch(rf"tensorrt_lean 11.4.0.106 does not start: {cause}.*it logged: {line}", said[0]), said
    assert said == said[:1] * 2


def real_lean(fake_gpu: Any) -> str:
    """Return LD_LIBRARY_PATH with the real lean runtime and the tests' driver."""
    library = Path(FOLDER, "lean-libraries", "tensorrt_lean_libs")
    if not (FOLDER and library.is_dir()):
        pytest.skip("needs NVIDIA's lean runtime: tests/plugins/tensorrt/fetch_bindings.sh")
    return f"{library}:{Path(fake_gpu.library).parent}"


@pytest.fixture
def rtx_plan(write_plan: Any) -> Path:
    """An engine that the real TensorRT for RTX has built."""
    file = write_plan(ModelFile(CLASSIFIER, CLASSIFIER.parents[1], 1), {"input": ([1, 3, 224, 224],) * 3})
    return Path(file.path)


def test_the_real_rtx_runtime_that_does_not_start_is_reported_with_its_own_line_and_the_cure(
    fake_gpu: Any, rtx_plan: Path
) -> None:
    """Its runtime is made without CUDA; the first engine is what fails."""
    script = STARTS.replace('b"plan"', "open(sys.argv[2], 'rb').read()")
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, "tensorrt_rtx", str(rtx_plan)],
        env={**os.environ, "LD_LIBRARY_PATH": str(Path(fake_gpu.library).parent), "FAKE_CUDA_VERSION": "12020"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert re.match(rf"{OLD}.* \(it logged: IRuntime::deserializeCudaEngine: .*cudaError 35: ", done.stdout)


HOST_CODE = """
from edge_server.plugins.tensorrt.library_adapter import EngineFault
REFUSED = "Cannot deserialize engine with lean runtime since IRuntime::getEngineHostCodeAllowed() is false."
runtime = library.create("Runtime")
assert type(runtime).engine_host_code_allowed.fset is not None
made = []
class Runtime:
    engine_host_code_allowed = False
    def __init__(self, logger):
        made.append(self)
    def deserialize_cuda_engine(self, plan):
        if not self.engine_host_code_allowed:
            library.logger.log(trt.ILogger.ERROR, REFUSED)
        return "engine" if self.engine_host_code_allowed else None
trt.Runtime = Runtime
try:
    library.deserialise(b"plan")
except EngineFault as fault:
    assert str(fault).startswith(REFUSED), fault
    assert "--backend-config=tensorrt,version-compatible=true" in str(fault), fault
else:
    raise AssertionError("the code of the plan may run")
library.allows_host_code = True
assert library.deserialise(b"plan") == "engine"
assert len(made) == 1
"""


@pytest.mark.parametrize("version", [*VERSIONS, LEAN])
def test_code_in_a_plan_runs_only_where_the_operator_allows_it(version: str) -> None:
    run(version, HOST_CODE)


def test_the_lean_runtime_serves_where_the_full_library_is_missing_and_builds_nothing() -> None:
    script = """
from edge_server.backends import load_backend
from edge_server.plugins.tensorrt import running_plugin
print(library.name, library.version, load_backend("tensorrt").has_builder)
running_plugin.cuda_driver.unavailable_reason = lambda: ""
running_plugin.importlib.util.find_spec = lambda name: name == "tensorrt"
print(repr(running_plugin.supported_library(["tensorrt"])))
"""
    assert run(LEAN, script).split() == ["tensorrt_lean", "11.4.0.106", "False", "''"]


DOUBLED = {
    "Runtime": "Runtime", "EngineDouble": "ICudaEngine", "Engine": "ICudaEngine", "ContextDouble": "IExecutionContext",
    "Context": "IExecutionContext",
}  # fmt: skip
"""Class of the tests' double -> the class of TensorRT."""

ABSENT = {
    "8.6.1": {
        "ICudaEngine.device_memory_size_v2",
        "ICudaEngine.get_tensor_profile_values",
        "IExecutionContext.set_device_memory",
    }
}
"""What the double has and one version has not: the adapter asks for each of these before it uses it."""

DESCRIBE = """
import json
classes = {"Runtime": trt.Runtime, "ICudaEngine": trt.ICudaEngine, "IExecutionContext": trt.IExecutionContext}
print(json.dumps({name: {key: getattr(one, key).__doc__ or "" for key in dir(one)} for name, one in classes.items()}))
"""


def doubled_members() -> list[tuple[str, str, list[str] | None]]:
    """Return class of TensorRT, name and arguments of all that the double has in public; None: it is no function."""
    found: list[tuple[str, str, list[str] | None]] = []
    for path in (HERE / "fake_gpu" / "runtime_double.py", HERE / "conftest.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for item in node.body if isinstance(node, ast.ClassDef) and node.name in DOUBLED else ():
                assert isinstance(node, ast.ClassDef)
                of = DOUBLED[node.name]
                if isinstance(item, ast.Assign):
                    found += [(of, name.id, None) for name in item.targets if isinstance(name, ast.Name)]
                elif isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
                    # A property, or its setter.
                    is_read = any(
                        getattr(one, "id", getattr(one, "attr", "")) in ("property", "setter")
                        for one in item.decorator_list
                    )
                    found.append((of, item.name, None if is_read else [one.arg for one in item.args.args[1:]]))
    return found


def signatures(text: str) -> list[tuple[list[str], int]]:
    """Return, for each overload in a docstring of pybind11, the names of the arguments, and how many must be given."""
    found = []
    for inner in re.findall(r"^(?:\d+\. )?\w+\(self: [^,)]*(?:, )?(.*)\) -> ", text, re.MULTILINE):
        # An argument begins with a name and a colon; a type may hold commas too.
        arguments = re.split(r", (?=\w+: )", inner) if inner else []
        found.append(([one.partition(":")[0] for one in arguments], sum(" = " not in one for one in arguments)))
    return found


@pytest.mark.parametrize("version", [*VERSIONS, LEAN])
def test_the_double_has_nothing_that_the_bindings_have_not(version: str) -> None:
    real: dict[str, dict[str, str]] = json.loads(run(version, DESCRIBE))
    members = doubled_members()
    assert len(members) > 20
    absent = {f"{of}.{name}" for of, name, _ in members if name not in real[of]}
    assert absent == ABSENT.get(version, set())
    wrong = []
    for of, name, arguments in members:
        if arguments is None or f"{of}.{name}" in absent:
            continue
        known = signatures(real[of][name])
        assert known, f"{of}.{name}: {real[of][name]}"
        fits = any(names[: len(arguments)] == arguments and needed <= len(arguments) for names, needed in known)
        # Before 10, an execution context has another function for each strategy.
        if not fits and (version, name) != ("8.6.1", "create_execution_context"):
            wrong.append(f"{of}.{name}: {arguments}, expected {known}")
    assert wrong == []


def test_every_function_of_the_driver_that_the_package_names_is_in_a_real_driver() -> None:
    found = list(Path(FOLDER, "driver").glob("*/libcuda-*")) if FOLDER else []
    if not found:
        pytest.skip("needs a real libcuda: tests/plugins/tensorrt/fetch_bindings.sh")
    driver: Any = ctypes.CDLL(str(found[0]))
    package = HERE.parents[2] / "edge_server"
    names = {name for file in package.rglob("*.py") for name in re.findall(r'"(cu[A-Z]\w+)"', file.read_text())}
    assert len(names) > 30
    assert [name for name in sorted(names) if not hasattr(driver, name)] == []
