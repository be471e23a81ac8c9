"""The commands `check`, `status` and `serve --help` as processes, and their error messages."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_server.cli.model_text import reason_line
from tests.kit.model_folder import model_folder
from tests.kit.server import serve

Edge = Callable[..., subprocess.CompletedProcess[str]]
IDENTITY = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [-1] }
"""
COLUMN_TITLES = ("MODEL", "VERSION", "BACKEND", "PRECISION", "INPUTS", "OUTPUTS", "LOAD MS", "INFER MS", "MEMORY MB")


def add(repository: Path, name: str, config: str = IDENTITY, version: int = 1) -> Path:
    folder = repository / name
    (folder / str(version)).mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    return path


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_check_of_nothing_is_an_error_of_two_lines(edge: Edge) -> None:
    done = edge("check")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "edge-server check: error: expected a repository, DIR", "edge-server check --help shows its options"
    ]  # fmt: skip


def test_check_prints_a_table_of_working_models_and_exits_zero(edge: Edge, repository: Path) -> None:
    add(repository, "one")
    add(repository, "two")
    done = edge("check", str(repository))
    assert done.returncode == 0, done.stderr
    heads, _, *rows = done.stdout.splitlines()
    assert tuple(cells(heads)) == COLUMN_TITLES
    assert [cells(row)[0] for row in rows] == ["one", "two"]
    name, version, backend, *_ = cells(rows[0])
    assert (name, version, backend) == ("one", "1", "identity")
    assert "INPUT0 FP32[-1,-1]" in rows[0]
    assert "OUTPUT0 FP32[-1,-1]" in rows[0]
    load_ms, infer_ms, memory_mb = cells(rows[0])[-3:]
    assert float(load_ms) >= 0
    assert float(infer_ms) >= 0
    assert float(memory_mb) >= 0


def test_check_of_a_real_model_names_runtime_and_precision(edge: Edge) -> None:
    bundled = Path(__file__).parents[2] / "model_repository"
    done = edge("check", str(bundled))
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("efficientnet_lite0"))
    assert any(runtime in row for runtime in ("openvino", "onnxruntime"))
    assert "input FP32[-1,3,224,224]" in row


def test_check_prints_the_reason_of_each_failure_and_exits_nonzero(edge: Edge, repository: Path) -> None:
    add(repository, "good")
    add(repository, "no_backend", 'backend: "nonsense"')
    (add(repository, "damaged", 'backend: "onnxruntime"') / "1" / "model.onnx").write_bytes(b"not a model")
    add(repository, "misspelt", IDENTITY + "max_batch_siez: 3")
    fixed = IDENTITY.replace("identity", "stub").replace("-1", "4")
    add(repository, "fails_on_generated", fixed + parameter("stub_fail", "true"))
    done = edge("check", str(repository))
    assert done.returncode == 1
    assert "good" in done.stdout
    for name in ("no_backend", "damaged", "misspelt"):
        assert any(line.startswith(f"FAILED {name}") for line in done.stderr.splitlines()), (name, done.stderr)
    told = [line for line in done.stderr.splitlines() if " fails_on_generated version 1: " in line]
    assert [line[:48] for line in told] == ["WARNING fails_on_generated version 1: it loads a"], "once"
    assert "nonsense" in done.stderr
    assert "max_batch_siez" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_check_says_in_one_line_what_to_copy_where_and_v_lists_the_names_of_files(edge: Edge, repository: Path) -> None:
    add(repository, "empty", "")
    add(repository, "stated", 'backend: "onnxruntime"')
    done = edge("check", str(repository))
    first, second = done.stderr.splitlines()
    assert first.startswith(f"FAILED empty version 1: copy the model's file into '{repository}/empty/1' as model.onnx ")
    assert second.startswith(f"FAILED stated version 1: copy the model's file to '{repository}/stated/1/model.onnx': ")
    assert edge("check", str(repository), "-v").stderr.startswith(done.stderr + "Names of model files: model.gguf, ")


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is installed")
def test_check_says_that_another_runtime_than_the_stated_one_serves(edge: Edge, repository: Path) -> None:
    pytest.importorskip("onnxruntime")
    folder = add(repository, "net", 'backend: "tensorrt"')
    shutil.copy(Path(__file__).parents[2] / "model_repository/efficientnet_lite0/1/model.onnx", folder / "1")
    done = edge("check", str(repository))
    assert done.returncode == 0, done.stderr
    assert "NOTE net version 1: backend 'tensorrt' was skipped for 'onnxruntime': runtime tensorrt " in done.stderr
    (folder / "config.pbtxt").write_text("")
    assert edge("check", str(repository)).stderr == "", "the runtime of the usual order is no note"


def test_a_reason_does_not_repeat_the_version() -> None:
    assert reason_line("net", "1", "model 'net' version 1, file 'model.onnx': damaged") == (
        "net version 1: file 'model.onnx': damaged"
    )


def test_check_passes_a_servable_model_that_random_inputs_do_not_suit(edge: Edge, repository: Path) -> None:
    add(repository, "any_size", IDENTITY.replace("identity", "stub") + parameter("stub_fail", "true"))
    done = edge("check", str(repository))
    assert done.returncode == 0, done.stderr
    assert cells(done.stdout.splitlines()[2])[-2] == "not tried"
    (note,) = done.stderr.splitlines()
    assert note.startswith("NOTE any_size version 1: it loads and is served, but was not tried")
    assert "(INPUT0 [1, 1]; then 64 for each dimension of any size)" in note
    assert "model_warmup" in note


def test_check_fails_a_python_model_whose_return_value_is_wrong_for_all_inputs(edge: Edge, repository: Path) -> None:
    bodies = {
        "double": "return [pb.InferenceResponse([pb.Tensor('OUTPUT0', np.zeros((1, 1), np.float64))])]",
        "nothing": "return None",
        "picky": "raise ValueError('too small')",
        "silent": "requests[0].get_response_sender()",
    }
    for name, body in bodies.items():
        more = "model_transaction_policy { decoupled: true }" if name == "silent" else ""
        folder = add(repository, name, IDENTITY.replace("identity", "python") + more)
        (folder / "1" / "model.py").write_text(
            "import numpy as np\nimport triton_python_backend_utils as pb\n\n\n"
            f"class TritonPythonModel:\n    def execute(self, requests):\n        {body}\n"
        )
    done = edge("check", str(repository))
    errors = " ".join(done.stderr.split())
    assert done.returncode == 1
    assert errors.count("FAILED") == 2
    assert "'silent', request 'warmup probe': the model let go of the request without a final response" in errors
    assert "WARNING double version 1: output 'OUTPUT0' was answered as FP64 [1, 1], but its configuration" in errors
    assert "'nothing', request 'warmup probe': execute returned None" in errors
    assert "NOTE picky version 1: it loads and is served, but was not tried" in errors


def test_check_names_a_python_model_whose_finalize_never_returns_and_ends(edge: Edge, repository: Path) -> None:
    folder = add(repository, "stays", IDENTITY.replace("identity", "python"))
    (folder / "1" / "model.py").write_text(
        "import threading\nimport numpy as np\nimport triton_python_backend_utils as pb\n\n\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        y = np.zeros((1, 1), np.float32)\n"
        "        return [pb.InferenceResponse([pb.Tensor('OUTPUT0', y)]) for _ in requests]\n\n"
        "    def finalize(self):\n        threading.Event().wait()\n"
    )
    done = edge("check", str(repository))
    assert done.returncode == 0, done.stderr
    assert cells(done.stdout.splitlines()[2])[0] == "stays"
    assert "model 'stays' version 1 is left behind: " in done.stderr
    assert "(finalize), has not ended" in done.stderr


def parameter(key: str, value: str) -> str:
    return f'\nparameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def test_check_covers_all_given_repositories(edge: Edge, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        add(tmp_path / name, f"model_of_{name}")
    done = edge("check", str(tmp_path / "first"), str(tmp_path / "second"))
    assert done.returncode == 0, done.stderr
    assert "model_of_first" in done.stdout
    assert "model_of_second" in done.stdout


def test_check_fails_for_a_mistake_in_the_sources_file_and_passes_the_corrected_file(
    edge: Edge, repository: Path
) -> None:
    add(repository, "one")
    file = repository.parent / "cameras.toml"
    camera = '[[sources]]\nname = "yard"\nurl = "demo"\nmodel = "one"\n'
    file.write_text(camera + "fsp = 5\n")
    done = edge("check", str(repository), f"--sources-file={file}")
    assert done.returncode == 1
    assert "one" in done.stdout
    error = f"FAILED {file}: source 'yard': unknown key fsp, did you mean 'fps'?, expected name, url"
    assert " ".join(done.stderr.split()).startswith(error)
    file.write_text(camera + "fps = 5\n")
    done = edge("check", str(repository), f"--sources-file={file}")
    assert (done.returncode, done.stderr) == (0, "")


def test_check_of_an_empty_repository_reports_that(edge: Edge, repository: Path) -> None:
    done = edge("check", str(repository))
    assert done.returncode == 1
    assert "no model" in done.stderr


def test_check_of_a_folder_that_is_no_repository_is_one_line_and_exit_code_2(edge: Edge, tmp_path: Path) -> None:
    done = edge("check", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "nowhere" in done.stderr


@pytest.fixture
def url(repository: Path) -> Iterator[str]:
    add(repository, "one")
    add(repository, "broken", 'backend: "nonsense"')
    flags = ("--allow-grpc=false", "--allow-metrics=false", "--strict-readiness=true")
    with serve(repository, *flags) as server:
        yield server.url("")
        assert server.stop() == 0


def test_status_prints_the_table_of_a_running_server(edge: Edge, url: str) -> None:
    done = edge("status", "--url", url)
    # A model that was wished for and is not served makes a strict server not ready.
    assert done.returncode == 1, done.stderr
    assert "NOT ready" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("one "))
    assert cells(row)[1:4] == ["1", "READY", "identity"]
    assert any(line.startswith("broken") and "UNAVAILABLE" in line for line in done.stdout.splitlines())
    assert "nonsense" in done.stdout


def test_status_without_a_server_is_one_line(edge: Edge) -> None:
    done = edge("status", "--url", "http://127.0.0.1:1", "--timeout=2")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "http://127.0.0.1:1" in done.stderr


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1", "http://"])
def test_status_of_an_invalid_address_is_an_error_without_a_traceback(edge: Edge, url: str) -> None:
    done = edge("status", "--url", url)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert done.stderr


def test_serve_help_names_every_flag_with_variable_and_default(edge: Edge) -> None:
    done = edge("serve", "--help")
    assert done.returncode == 0
    for words in (
        "--model-repository", "--http-port", "--grpc-port", "--metrics-port", "--model-control-mode", "--load-model",
        "--strict-readiness", "--exit-on-error", "--exit-timeout-secs", "--log-verbose", "--log-format",
        "--allow-client-shm", "EDGE_SERVER_HTTP_PORT", "default 8000", "default 8001", "default 8002",
    ):  # fmt: skip
        assert words in done.stdout, words


def test_the_command_without_arguments_shows_its_usage(edge: Edge) -> None:
    for arguments, code in (([], 64), (["--help"], 0), (["-h"], 0)):
        done = edge(*arguments)
        assert done.returncode == code
        assert all(command in done.stdout for command in ("serve", "check", "status"))


def test_an_unknown_command_is_refused_by_name(edge: Edge) -> None:
    done = edge("srve")
    assert done.returncode == 64
    assert "srve" in done.stderr
    assert "Traceback" not in done.stderr


def test_config_reads_back_the_output_of_print_config(edge: Edge, repository: Path, tmp_path: Path) -> None:
    flags = [f"--model-repository={repository}", "--http-port=8123", "--log-format=json"]
    printed = edge("serve", *flags, "--print-config")
    assert printed.returncode == 0, printed.stderr
    file = tmp_path / "edge.toml"
    file.write_text(printed.stdout)
    again = edge("serve", f"--config={file}", "--print-config")
    assert again.returncode == 0, again.stderr
    assert "8123" in again.stdout


def stride_eight(path: Path) -> None:
    """Write a network for pictures of any size, but none smaller than 8x8."""
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weights = helper.make_tensor("W", kind, [2, 3, 8, 8], [0.01] * (2 * 3 * 8 * 8))
    node = helper.make_node("Conv", ["images", "W"], ["found"], strides=[8, 8], kernel_shape=[8, 8])
    images = helper.make_tensor_value_info("images", kind, ["batch", 3, "height", "width"])
    found = helper.make_tensor_value_info("found", kind, ["batch", 2, "rows", "columns"])
    graph = helper.make_graph([node], "g", [images], [found], [weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def test_check_runs_a_network_for_any_image_size_with_a_large_image(edge: Edge, repository: Path) -> None:
    (repository / "any_size" / "1").mkdir(parents=True)
    stride_eight(repository / "any_size" / "1" / "model.onnx")
    done = edge("check", str(repository))
    assert done.returncode == 0, done.stderr
    assert float(cells(done.stdout.splitlines()[2])[-2]) > 0


def test_optimize_names_the_option_for_inputs_if_random_shapes_fail(edge: Edge, repository: Path) -> None:
    (repository / "any_size" / "1").mkdir(parents=True)
    stride_eight(repository / "any_size" / "1" / "model.onnx")
    done = edge("optimize", str(repository / "any_size"), "--runtimes=onnxruntime", "--precisions=f32")
    assert done.returncode == 2
    assert "the shape of 'images' open" in done.stderr
    assert "--input-data FILE.npz" in done.stderr


def test_check_names_a_file_that_is_not_named_like_a_model(edge: Edge, repository: Path) -> None:
    model_folder(repository / "exported", files={"1/best.onnx": b""})
    done = edge("check", str(repository))
    assert done.returncode == 1
    assert "call 'best.onnx' 'model.onnx', or " in done.stderr
