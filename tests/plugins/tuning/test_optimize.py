"""`edge-server optimize` as a process: real runtimes on small models, and faulty ones of every type."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tritonclient.http
from onnx import TensorProto, helper, numpy_helper

from edge_server.cli.main import main
from edge_server.plugins.tuning import optimize as optimize_command
from tests.kit.child_processes import children_of

COMMAND = Path(sys.executable).parent / "edge-server"
BUNDLED = Path(__file__).parents[3] / "model_repository"
TINY_GGUF = Path(__file__).parents[2] / "data/tiny_llm/tiny.gguf"
CPU_RUNTIMES = "--runtimes=openvino,onnxruntime"
QUICK = ("--runs=20", "--seconds=1", "--samples=3")

FAULTY = """
    import os, signal, time
    from edge_server.backends.onnxruntime.backend import OnnxRuntimeBackend
    from edge_server.errors import BackendError

    def fault(name, run):
        def changed(inputs, outputs):
            if name == "crash_run":
                os.kill(os.getpid(), signal.SIGSEGV)
            if name == "hang_run":
                time.sleep(3600)
            if name == "refuse_run":
                raise BackendError("no kernel for it")
            if name == "hungry":
                kept.append(bytearray(b"x") * (3 << 30))
                time.sleep(3600)
            if name == "slow":
                time.sleep(0.02)
            found = run(inputs, outputs)
            if name == "wrong":
                found = {key: array * 1.5 for key, array in found.items()}
            return found
        kept = []
        return changed

    class Faulty(OnnxRuntimeBackend):
        def open(self, job):
            if self.name == "crash_open":
                print("the driver is on fire", flush=True)
                os.abort()
            session = super().open(job)
            session.run = fault(self.name, session.run)
            return session
"""
FAULTS = ("crash_open", "crash_run", "hang_run", "hungry", "refuse_run", "slow", "wrong")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package whose runtimes fail as their names say."""
    site = tmp_path_factory.mktemp("site")
    (site / "faulty_runtime.py").write_text(textwrap.dedent(FAULTY))
    info = site / "faulty_runtime-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-runtime\nVersion: 1.0\n")
    entries = "".join(f"{name} = faulty_runtime:Faulty\n" for name in FAULTS)
    (info / "entry_points.txt").write_text(f"[edge_server.backends]\n{entries}")
    return site


def environment(site: Path | None = None, **more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EDGE_SERVER_")}
    return {**kept, **({"PYTHONPATH": str(site)} if site is not None else {}), **more}


def optimize(*words: object, site: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    command = [str(COMMAND), "optimize", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(site, **more))


def found_by(*words: object, site: Path | None = None, **more: str) -> dict[str, Any]:
    done = optimize(*words, "--json", *QUICK, site=site, **more)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return {**answer, "by_title": {one["title"]: one for one in answer["candidates"]}}


@pytest.fixture
def optimize_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`optimize_here(*words)` is `optimize` in this process: the start of another one takes longer than the command."""
    for key in [key for key in os.environ if key.startswith("EDGE_SERVER_")]:
        monkeypatch.delenv(key)
    # As on a machine without accelerators: to look for them takes a process for each runtime.
    monkeypatch.setattr(optimize_command, "list_devices", lambda runtime, limits: {})

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        arguments = ["optimize", *map(str, words)]
        capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as error:  # argparse's way
            code = int(str(error.code))
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run


def net() -> onnx.ModelProto:
    """FP32 [batch, 64] -> FP32 [batch, 10], seeded weights."""
    generator = np.random.default_rng(7)
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "w0", "b0"], ["h0"]),
            helper.make_node("Relu", ["h0"], ["h1"]),
            helper.make_node("Gemm", ["h1", "w1", "b1"], ["scores"]),
        ],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 10])],
        [
            numpy_helper.from_array(generator.standard_normal(shape).astype(np.float32), name)
            for name, shape in (("w0", (64, 128)), ("b0", (128,)), ("w1", (128, 10)), ("b1", (10,)))
        ],
    )
    return finished(graph)


def quantised_net() -> onnx.ModelProto:
    """FP32 [batch, 64] -> FP32 [batch, 10] by int8 weights between QuantizeLinear and DequantizeLinear."""
    generator = np.random.default_rng(7)
    # Seven bits: on a processor without VNNI OpenVINO adds two products in 16 bits, which eight bits exceed.
    weights = generator.integers(-63, 64, (64, 10)).astype(np.int8)
    graph = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["x", "sx", "zero"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "sx", "zero"], ["dx"]),
            helper.make_node("DequantizeLinear", ["w", "sw", "zero"], ["dw"]),
            helper.make_node("MatMul", ["dx", "dw"], ["scores"]),
        ],
        "quantised",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 10])],
        [
            numpy_helper.from_array(weights, "w"),
            numpy_helper.from_array(np.float32(1 / 127), "sx"),
            numpy_helper.from_array(np.float32(0.01), "sw"),
            numpy_helper.from_array(np.int8(0), "zero"),
        ],
    )
    return finished(graph)


def finished(graph: onnx.GraphProto) -> onnx.ModelProto:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


@pytest.fixture
def add(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a model into a repository and returns its folder."""

    def write(name: str = "net", config: str = "", model: onnx.ModelProto | None = None) -> Path:
        folder = tmp_path / "models" / name
        (folder / "1").mkdir(parents=True)
        if config:
            (folder / "config.pbtxt").write_text(config)
        (folder / "1" / "model.onnx").write_bytes((model or net()).SerializeToString())
        return folder

    return write


# All precisions, by default, take a process more for each.
@pytest.mark.parametrize("precisions", [["--precisions=f32"], pytest.param([], marks=pytest.mark.full)])
def test_candidates_are_measured_and_compared_and_a_server_serves_the_chosen_one(
    add: Callable[..., Path], start_server: Callable[..., str], precisions: list[str]
) -> None:
    folder = add(config='max_batch_size: 4 parameters { key: "a" value { string_value: "é" } }')
    found = found_by(folder, "--write=fast", "--objective=throughput", *precisions, CPU_RUNTIMES)
    assert found["reference"] == "openvino f32"
    for title in ("openvino f32", "onnxruntime f32"):
        one = found["by_title"][title]
        assert [(item["rows"], item["runs"]) for item in one["latency_ms"]] == [(1, 20), (4, 20)]
        assert 0 < one["latency_ms"][0]["p50"] <= one["latency_ms"][0]["p99"]
        assert one["memory_bytes"] > 30e6
        assert one["max_relative_difference"] < 1e-5
        assert one["top1_agreement"] == 1.0
    chosen = found["by_title"][found["chosen"]]
    text = (folder / "configs" / "fast.pbtxt").read_text()
    assert f'backend: "{chosen["runtime"]}"' in text
    assert list((folder / "configs").iterdir()) == [folder / "configs" / "fast.pbtxt"]
    client = tritonclient.http.InferenceServerClient(
        start_server(folder.parent, "--model-config-name=fast", environment=environment())
    )
    config = client.get_model_config("net")
    assert config["backend"] == chosen["runtime"]
    assert config["max_batch_size"] == 4
    stated = {key: value["string_value"] for key, value in config["parameters"].items()}
    assert (stated["a"], stated["precision"]) == ("é", chosen["precision_asked"])
    given = np.random.default_rng(1).random((3, 64), np.float32)
    tensor = tritonclient.http.InferInput("x", [3, 64], "FP32")
    tensor.set_data_from_numpy(given)
    expected = onnxruntime.InferenceSession(str(folder / "1" / "model.onnx")).run(None, {"x": given})[0]
    np.testing.assert_allclose(client.infer("net", [tensor]).as_numpy("scores"), expected, rtol=1e-3, atol=1e-2)
    client.close()


@pytest.mark.full
def test_a_crashing_refusing_or_wrong_candidate_fails_only_its_row(add: Callable[..., Path], faulty: Path) -> None:
    found = found_by(add(), "--runtimes=onnxruntime,crash_open,crash_run,refuse_run,wrong", site=faulty)
    results = {title: (one["result"], one["reason"]) for title, one in found["by_title"].items()}
    assert found["chosen"] == found["reference"] == "onnxruntime f32"
    assert results["crash_open"][0] == "not opened"
    assert "was ended by SIGABRT" in results["crash_open"][1]
    assert "the driver is on fire" in results["crash_open"][1]
    assert results["crash_run"][0] == "failed"
    assert "was ended by SIGSEGV" in results["crash_run"][1]
    assert results["refuse_run"] == ("failed", "no kernel for it")
    assert results["wrong"] == ("beyond tolerance", "")
    assert found["by_title"]["wrong"]["max_relative_difference"] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.full
def test_an_inaccurate_candidate_can_be_chosen_with_a_larger_tolerance(add: Callable[..., Path], faulty: Path) -> None:
    words = ("--runtimes=slow,wrong", "--objective=latency")
    strict = found_by(add(), *words, site=faulty)
    assert strict["chosen"] == "slow"
    without_config = add("other")
    loose = found_by(without_config, *words, "--tolerance=0.6", "--write=quick", site=faulty)
    assert loose["chosen"] == "wrong"
    assert 'backend: "wrong"' in (without_config / "configs" / "quick.pbtxt").read_text()


@pytest.mark.full
def test_a_candidate_that_hangs_or_exhausts_memory_is_ended(add: Callable[..., Path], faulty: Path) -> None:
    words = ("--runtimes=onnxruntime,hang_run,hungry", "--timeout=15", "--memory-mb=1500")
    found = found_by(add(), *words, site=faulty)
    assert found["chosen"] == "onnxruntime f32"
    assert found["by_title"]["hang_run"]["reason"] == "it took longer than 15 s (--timeout)"
    assert re.fullmatch(
        r"it took \d+ MiB of memory, more than the 1500 MiB that it may \(--memory-mb\)",
        found["by_title"]["hungry"]["reason"],
    )


@pytest.mark.full
def test_a_quantised_model_is_tried_in_int8_and_compared_with_the_same_in_f32(add: Callable[..., Path]) -> None:
    found = found_by(add(model=quantised_net()), "--precisions=int8", "--tolerance=0.02", CPU_RUNTIMES)
    assert found["reference"] == "onnxruntime f32"
    assert {"openvino int8", "onnxruntime int8"} < found["by_title"].keys()
    for title in ("openvino int8", "onnxruntime int8"):
        one = found["by_title"][title]
        assert one["precision"] == "int8"
        assert one["max_relative_difference"] is not None
        assert one["max_relative_difference"] < 0.02


def test_the_operators_own_inputs_are_compared(
    add: Callable[..., Path], tmp_path: Path, optimize_here: Callable[..., Any]
) -> None:
    np.savez(tmp_path / "in.npz", x=np.random.default_rng(3).random((5, 64)).astype(np.float32))
    done = optimize_here(add(), f"--input-data={tmp_path / 'in.npz'}", "--runtimes=onnxruntime", "--json", *QUICK)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["samples"] == {"count": 5, "source": f"of {tmp_path / 'in.npz'}"}


def test_the_warm_up_data_of_the_configuration_are_compared(
    add: Callable[..., Path], optimize_here: Callable[..., Any]
) -> None:
    config = """max_batch_size: 4
        model_warmup { name: "zeros" batch_size: 1
          inputs { key: "x" value { data_type: TYPE_FP32 dims: [64] zero_data: true } } }
        model_warmup { name: "noise" batch_size: 2
          inputs { key: "x" value { data_type: TYPE_FP32 dims: [64] random_data: true } } }"""
    done = optimize_here(add(config=config), "--runtimes=onnxruntime", "--json", *QUICK)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["samples"] == {"count": 1, "source": "of model_warmup"}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": np.zeros((1, 64), np.float32)}, "has no input 'y'; it has x"),
        (None, "expected an .npz file of plain arrays"),
    ],
)
def test_inputs_that_do_not_fit_are_reported_with_the_expected_ones(
    add: Callable[..., Path],
    tmp_path: Path,
    optimize_here: Callable[..., Any],
    arrays: dict[str, Any] | None,
    message: str,
) -> None:
    path = tmp_path / "in.npz"
    if arrays is None:
        path.write_bytes(b"hello")
    else:
        np.savez(path, **arrays)
    done = optimize_here(add(), f"--input-data={path}", "--runtimes=onnxruntime")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_cannot_be_optimized_is_reported_before_anything_is_opened(
    add: Callable[..., Path], tmp_path: Path, optimize_here: Callable[..., Any]
) -> None:
    folder = add(config='name: "net"')
    (folder / "configs").mkdir()
    (folder / "configs" / "taken.pbtxt").write_text('backend: "openvino"')
    ensemble = add("both", "ensemble_scheduling { step { model_name: 'net' model_version: -1 } }")
    cases = [
        ((folder.parent / "nett",), "there is no model 'nett' in"),
        (("nett", f"--model-repository={folder.parent}"), "there are: both, net"),
        ((folder, "--version=3"), "model 'net' has no version 3; it has 1"),
        ((folder, "--runtimes=openvno"), "no runtime is called 'openvno'"),
        ((folder, "--precisions=int8"), "--precisions: no runtime has 'int8' for this model; there are f32"),
        ((folder, "--write=taken"), "exists already; --overwrite replaces it"),
        ((folder, "--write=../config"), "--write: expected letters, digits"),
        ((ensemble,), "model 'both' is an ensemble"),
        ((folder, "--tolerance=-1"), "expected a number from 0 to inf, got '-1'"),
        ((folder, "--runs=0"), "expected a whole number from 1 to 1000000, got '0'"),
        ((tmp_path / "empty" / "x",), "there is no folder"),
    ]
    for words, said in cases:
        done = optimize_here(*words)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert "opening" not in done.stderr


def test_a_file_that_no_runtime_opens_is_reported_with_the_reason_of_each(
    add: Callable[..., Path], optimize_here: Callable[..., Any]
) -> None:
    folder = add()
    (folder / "1" / "model.onnx").write_bytes(b"\x08\x07 this is no model")
    done = optimize_here(folder, "--runtimes=openvino,onnxruntime", "--precisions=f32", "--write=x")
    assert done.returncode == 2
    assert "no runtime opens it:" in done.stderr
    assert re.search(r"\n  openvino f32: model 'net' version 1, file 'model.onnx': \S", done.stderr)
    assert re.search(r"\n  onnxruntime f32: model 'net' version 1, file 'model.onnx': \S", done.stderr)
    assert not (folder / "configs").exists()


# SIGTERM is handled as SIGINT is: it is `full`.
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGKILL]
)
def test_an_interrupt_leaves_no_process_and_no_file(
    add: Callable[..., Path], faulty: Path, tmp_path: Path, number: signal.Signals
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    folder = add()
    words = (str(folder), "--runtimes=onnxruntime,slow", "--write=x", "--runs=100000", "--seconds=1000")
    process = subprocess.Popen(
        [str(COMMAND), "optimize", *words], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment(faulty, TMPDIR=str(scratch)),
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "round 1" in line:
            break
    children = children_of(process.pid)
    assert len(children) == 2
    process.send_signal(number)
    out, error = process.communicate(timeout=30)
    if number is signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert (process.returncode, out) == (130, "")
        assert error.endswith("interrupted; nothing was written\n")
        assert list(scratch.iterdir()) == []
    end_s = time.monotonic() + 20
    while any(is_alive(child) for child in children) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not any(is_alive(child) for child in children)
    assert not (folder / "configs").exists()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.full
def test_the_bundled_classifier_gets_a_table_and_progress_lines(tmp_path: Path) -> None:
    words = (
        "--precisions=bf16", "--runs=10", "--seconds=1", "--samples=2", CPU_RUNTIMES, f"--state-dir={tmp_path}"
    )  # fmt: skip
    done = optimize(BUNDLED / "efficientnet_lite0", *words)
    assert done.returncode == 0, done.stderr
    head, _, *rows = done.stdout.splitlines()
    assert re.split(r"\s{2,}", head.strip()) == [
        "RUNTIME", "ASKED", "IN FORCE", "LOAD MS", "P50 MS", "P99 MS", "1 ROW/S", "ROWS/S OF 8", "MEMORY MB", "MAX ABS",
        "MAX REL", "TOP-1",
    ]  # fmt: skip
    cells = [re.split(r"\s{2,}", row.strip()) for row in rows]
    assert [cell[:2] for cell in cells[:2]] == [["openvino", "f32"], ["onnxruntime", "f32"]]
    assert "reference" in cells[0][-1]
    assert float(cells[1][10]) < 1e-3
    assert sum("chosen" in cell[-1] for cell in cells) == 1
    assert "2 sample(s) generated, compared with openvino f32" in done.stdout
    assert "\r" not in done.stderr
    assert done.stderr.splitlines()[0] == "  0% openvino f32: opening"
    assert done.stderr.splitlines()[-1] == "100% done"


@pytest.mark.full
def test_an_engine_is_built_measured_and_kept_for_the_server(
    add: Callable[..., Path], faulty: Path, fake_gpu: Any, tmp_path: Path, start_server: Callable[..., str]
) -> None:
    """The builder is real; the GPU behind the last call is not."""
    folder, cache = add(config="max_batch_size: 4"), tmp_path / "engines"
    there = fake_gpu.environment(cache)
    # One path for both the faulty package and the GPU.
    both = {**there, "PYTHONPATH": os.pathsep.join([there["PYTHONPATH"], str(faulty)])}
    words = (f"--engine-cache-dir={cache}", "--precisions=fp32", "--write=engine")
    shapes = ("--profiles", "x:1x64", "x:2x64", "x:4x64")
    done = optimize(folder, "--runtimes=slow,tensorrt_rtx", *words, *shapes, "--json", *QUICK, **both)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["chosen"] == "tensorrt_rtx fp32", found
    assert found["candidates"][1]["max_relative_difference"] < 1e-5
    assert re.search(r"tensorrt_rtx fp32: \S.*, \d+ %", done.stderr)
    (kept,) = (cache / "engines").iterdir()
    built_s = (kept / "engine.plan").stat().st_mtime_ns
    assert json.loads((kept / "engine.json").read_text())["compared_with"] == "slow"
    address = start_server(
        folder.parent,
        "--model-config-name=engine",
        f"--engine-cache-dir={cache}",
        environment=environment(None, **there),
    )
    client = tritonclient.http.InferenceServerClient(address)
    assert client.get_model_config("net")["backend"] == "tensorrt_rtx"
    client.close()
    assert (kept / "engine.plan").stat().st_mtime_ns == built_s
    assert [path.name for path in (cache / "engines").iterdir()] == [kept.name]


@pytest.mark.full
def test_an_engine_without_a_gpu_is_built_and_its_row_has_the_reason_it_did_not_run(add: Callable[..., Path]) -> None:
    pytest.importorskip("tensorrt_rtx")
    if shutil.which("nvidia-smi"):
        pytest.skip("needs a box without a GPU")
    found = found_by(add(config="max_batch_size: 4"), "--runtimes=onnxruntime,tensorrt_rtx", "--precisions=fp32")
    one = found["by_title"]["tensorrt_rtx fp32"]
    assert one["result"] == "built, not run"
    assert one["reason"].startswith("built, not run: there is no NVIDIA driver")
    assert found["chosen"] == "onnxruntime f32"


@pytest.mark.full
def test_the_engines_of_a_gguf_file_are_timed_one_after_another_and_the_times_choose(
    tmp_path: Path, start_server: Callable[..., str]
) -> None:
    for module in ("xllamacpp", "openvino_genai"):
        pytest.importorskip(module, reason=f"needs {module}, of the extra test-all")
    folder, state = tmp_path / "models" / "tiny", tmp_path / "state"
    (folder / "1").mkdir(parents=True)
    state.mkdir()
    shutil.copy(TINY_GGUF, folder / "1" / "model.gguf")
    (folder / "config.pbtxt").write_text('parameters { key: "max_num_seqs" value { string_value: "2" } }')
    done = optimize(folder, f"--state-dir={state}", "--write=fast", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["texts_at_once"], found["tokens_of_a_text"]) == (2, 64)
    assert [one["runtime"] for one in found["candidates"]] == ["llama_cpp", "openvino_genai"]
    for one in found["candidates"]:
        assert not one["reason"]
        assert len(one["texts_ms"]) == 3
        assert one["tokens_per_s"] == pytest.approx(2 * 64 * 1000 / sorted(one["texts_ms"])[1])
        assert one["memory_bytes"] > 30e6
    assert f'backend: "{found["chosen"]}"' in (folder / "configs" / "fast.pbtxt").read_text()
    measurements = json.loads((state / "runtime_times.json").read_text())["measurements"]
    assert [item["at_once"] for item in measurements] == [2]
    # So that the slower one in this test is clearly faster.
    measurements[0]["times"] |= {"openvino_genai": [measurements[0]["times"]["openvino_genai"][0], 0.001]}
    (state / "runtime_times.json").write_text(json.dumps({"measurements": measurements}))
    client = tritonclient.http.InferenceServerClient(
        start_server(folder.parent, f"--state-dir={state}", environment=environment())
    )
    assert client.get_model_config("tiny")["backend"] == "openvino_genai"
    client.close()


@pytest.mark.full
def test_an_engine_that_cannot_read_a_gguf_file_fails_only_its_row(tmp_path: Path) -> None:
    for module in ("xllamacpp", "openvino_genai"):
        pytest.importorskip(module, reason=f"needs {module}, of the extra test-all")
    folder = tmp_path / "models" / "tiny"
    shutil.copytree(TINY_GGUF.parent / "lora", folder / "1" / "adapters")
    shutil.copy(TINY_GGUF, folder / "1" / "model.gguf")
    done = optimize(folder)
    assert done.returncode == 0, done.stderr
    assert re.search(r"openvino_genai +- +- +- +- +failed", done.stdout)
    assert re.search(r"llama_cpp .*chosen", done.stdout)
    assert "failed: openvino_genai: model 'tiny' version 1" in done.stdout
    assert "LoRA adapters are for the backend llama_cpp" in done.stdout
    assert "8 texts at once" in done.stdout
