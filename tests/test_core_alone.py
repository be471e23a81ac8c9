"""The core serves without its plugins: a copy of the package without the folder `plugins`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc

import edge_server
from tests.forked_commands import ForkedCommands

BUNDLED = Path(edge_server.__file__).parents[1] / "model_repository"


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the copy."""
    folder = tmp_path_factory.mktemp("core")
    package = Path(edge_server.__file__).parent
    # With compiled files, as their making takes long, but not with those that another process is writing.
    shutil.copytree(package, folder / "edge_server", ignore=shutil.ignore_patterns("plugins", "*.pyc.*"))
    # An editable installation would find what is missing in the copy.
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "sys.meta_path[:] = [each for each in sys.meta_path if '__editable__' not in getattr(each, '__module__', '')]\n"
    )
    return folder


PROLOGUE = """
import sys
# An editable installation would find the plugins in the folder that was copied.
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder)]
"""
PROGRAM = f"""{PROLOGUE}
from edge_server.cli.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def run(core: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCommands]:
    with ForkedCommands(core, tmp_path_factory.mktemp("outputs"), PROLOGUE) as commands:
        yield commands


@contextlib.contextmanager
def serving(core: Path, models: Path) -> Iterator[tuple[str, str]]:
    ports = ("--http-port=0", "--grpc-port=0", "--allow-metrics=false")
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "serve", f"--model-repository={models}", *ports], cwd=core,
        env={**os.environ, "PYTHONPATH": str(core)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if found := re.search(r"is ready: HTTP http://(\S+?);? gRPC (\S+)", line):
                    yield found[1], found[2]
                    return
            raise AssertionError("".join(lines))
        finally:
            process.terminate()
            process.communicate(timeout=30)


@pytest.fixture(scope="module")
def served(core: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """HTTP and gRPC address of a server of a bundled model and a Python model, and their folder."""
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(BUNDLED / "efficientnet_lite0", models / "efficientnet_lite0")
    (models / "written" / "1").mkdir(parents=True)
    (models / "written" / "1" / "model.py").touch()
    (models / "written" / "config.pbtxt").write_text('backend: "python"')
    with serving(core, models) as addresses:
        yield *addresses, models


def test_it_serves_the_bundled_models_and_reloads(served: tuple[str, str, Path]) -> None:
    http, address, models = served
    with urllib.request.urlopen(f"http://{http}/v2/models/efficientnet_lite0", timeout=60) as reply:
        assert json.load(reply)["outputs"][0]["name"] == "probabilities"
    request = urllib.request.Request(
        f"http://{http}/v2/models/efficientnet_lite0/infer", b"\xff\xd8", {"Content-Type": "image/jpeg"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    with refused.value as answer:
        assert (answer.code, "request JSON" in json.load(answer)["error"]) == (400, True)
    client = tritonclient.grpc.InferenceServerClient(address)
    metadata = client.get_model_metadata("efficientnet_lite0").inputs[0]
    tensor = tritonclient.grpc.InferInput(metadata.name, [1, *metadata.shape[1:]], metadata.datatype)
    tensor.set_data_from_numpy(np.zeros([1, *metadata.shape[1:]], np.float32))
    assert client.infer("efficientnet_lite0", [tensor]).as_numpy("probabilities").shape[0] == 1
    shutil.copytree(models / "efficientnet_lite0" / "1", models / "efficientnet_lite0" / "2")
    end_s = time.monotonic() + 60
    while not client.is_model_ready("efficientnet_lite0", "2"):
        assert time.monotonic() < end_s, "the new version does not serve"
        time.sleep(0.05)
    client.close()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("serve", "--power-budget-watts=10"), "flag --power-budget-watts"),
        (("check", "m", "--governor=false"), "flag --governor"),
        (("serve", "--engine-builder=false"), "flag --engine-builder"),
        (("serve", "--sources-file=cameras.toml"), "flag --sources-file"),
        (("serve", "--config=frames.toml"), "table [frames]"),
    ],
)
def test_a_setting_of_a_missing_plugin_is_unknown(
    core: Path, run: ForkedCommands, arguments: tuple[str, ...], named: str
) -> None:
    (core / "frames.toml").write_text("[frames]\nmax_streams = 3\n")
    done = run(*arguments)
    assert done.returncode == 78
    assert f"unknown {named}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--model-repository=s3://bucket/models",), "model repository at s3://: expected a folder\n"),
        (
            ("--model-repository=.", "--trace-config=mode=opentelemetry"),
            "trace mode opentelemetry: no plugin exports traces",
        ),
    ],
)
def test_a_value_that_a_missing_plugin_serves_is_refused_with_the_reason(
    run: ForkedCommands, arguments: tuple[str, ...], reason: str
) -> None:
    done = run("serve", *arguments)
    assert done.returncode == 2
    assert reason in done.stderr


@pytest.mark.parametrize(
    ("file", "backend"),
    [("model.pt", "pytorch"), ("model.plan", "tensorrt"), ("model.gguf", "llama_cpp")],
)
def test_a_model_for_a_missing_backend_names_it_or_its_file(
    run: ForkedCommands, tmp_path: Path, file: str, backend: str
) -> None:
    for name, config in (("stated", f'backend: "{backend}"'), ("unstated", "")):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / file).touch()
        (tmp_path / name / "config.pbtxt").write_text(config)
    done = run("check", str(tmp_path))
    assert done.returncode == 1
    assert f"no backend is called '{backend}'" in done.stderr
    assert f"the folder holds '{file}'" in done.stderr


def test_it_serves_beside_a_python_model_and_says_in_the_index_what_is_missing(served: tuple[str, str, Path]) -> None:
    request = urllib.request.Request(f"http://{served[0]}/v2/repository/index", b"")
    with urllib.request.urlopen(request, timeout=60) as reply:
        index = json.load(reply)
    assert ("efficientnet_lite0", "READY") in {(model["name"], model["state"]) for model in index}
    (reason,) = (model["reason"] for model in index if model["name"] == "written")
    assert "no backend is called 'python'; there are " in reason


def test_a_path_of_a_missing_plugin_is_not_found(served: tuple[str, str, Path]) -> None:
    for path in ("/", "/edge/v1/cameras", "/edge/v1/governor", "/v1/chat/completions"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://{served[0]}{path}", timeout=60)
        with refused.value as answer:
            assert (answer.code, json.load(answer)["error"]) == (404, "Not Found")


def test_frame_streams_are_unimplemented(served: tuple[str, str, Path]) -> None:
    with grpc.insecure_channel(served[1]) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            next(channel.stream_stream("/edge.frames.v1.FrameService/Stream")(iter([b""])))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_its_commands_are_those_of_the_core(run: ForkedCommands) -> None:
    commands = re.findall(r"^  (\w+) ", run("--help").stdout, re.MULTILINE)
    assert "serve" in commands
    assert {"perf", "stream"} & set(commands) == set()
