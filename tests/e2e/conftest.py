"""The installed server in its own process, and repositories of small real models for it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.kit.eventually import eventually
from tests.kit.model_folder import parameters
from tests.kit.models import DTYPES, FAILING, LABELLED, REPEAT, STUB_TENSORS, Repository, conv_model, identity_config
from tests.kit.server import ServerProcess, serve


class SharedServers:
    """One server for each set of flags, in explicit mode, started when a test first asks for it.

    `with shared_server(repository, *flags) as server:` adds the models in the folder `repository` under their own
    names, loads them, and removes them at the end. So tests share a server and do not see each other's models.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[tuple[str, ...], tuple[ServerProcess, Path]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> SharedServers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def __call__(self, repository: Path, *flags: str) -> Iterator[ServerProcess]:
        server, models = self._running.get(flags) or self._start(flags)
        names = sorted(folder.name for folder in repository.iterdir() if folder.is_dir())
        for name in names:
            shutil.copytree(repository / name, models / name, symlinks=True)
        try:
            for name in names:
                status, text = server.request("POST", f"/v2/repository/models/{name}/load", b"{}")
                assert status == 200, text
            yield server
        finally:
            for name in names:
                server.request("POST", f"/v2/repository/models/{name}/unload", b"{}")
            # Orders are answered before versions have ended; the next test may load a model of the same name.
            eventually(lambda: not self._unloading(server).intersection(names))
            for name in names:
                shutil.rmtree(models / name)

    @staticmethod
    def _unloading(server: ServerProcess) -> set[str]:
        _, index = server.ask("/v2/repository/index", {})
        return {entry["name"] for entry in index if entry.get("state") == "UNLOADING"}

    def _start(self, flags: tuple[str, ...]) -> tuple[ServerProcess, Path]:
        models = self._folder / str(len(self._running))
        models.mkdir()
        server = self._stack.enter_context(serve(models, "--model-control-mode=explicit", *flags))
        self._stack.callback(server.stop_cleanly)
        self._running[flags] = server, models
        return self._running[flags]


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServers]:
    with SharedServers(tmp_path_factory.mktemp("shared")) as servers:
        yield servers


def write_zoo(repository: Repository) -> None:
    """Write one model of every kind that clients ask for."""
    for datatype in DTYPES:
        repository.add(f"same_{datatype}", identity_config(datatype))
    repository.add("same_pair", identity_config("FP32", inputs=2))
    repository.add("fixed", identity_config("INT32", "2, 3", inputs=2, batch=0))
    slow = parameters(execute_delay_ms="300")
    repository.add("slow", identity_config("INT32", more=slow))
    repository.add("failing", 'backend: "stub"\n' + STUB_TENSORS + FAILING)
    repository.add("repeat", REPEAT)
    repository.add("labelled", LABELLED, files={"labels.txt": "cat\ndog\nhen\nowl\n"})
    for backend in ("onnxruntime", "openvino"):
        repository.add_sub(f"add_sub_{backend}", f'backend: "{backend}"')
        repository.add(f"conv_{backend}", f'backend: "{backend}"\nmax_batch_size: 4', model=conv_model())
    for version in (1, 2, 4):
        repository.add_sub("versions", 'backend: "onnxruntime"\nversion_policy { all {} }', version)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server of many models, shared by the tests that do not change it."""
    repository = Repository(tmp_path_factory.mktemp("zoo"))
    write_zoo(repository)
    with serve(repository.path) as server:
        yield server
        server.stop_cleanly()


@pytest.fixture(scope="session")
def conv() -> onnx.ModelProto:
    return conv_model()


@pytest.fixture(scope="session")
def picture() -> bytes:
    """A gray JPEG of 640 x 480 pixels."""
    cv2 = pytest.importorskip("cv2")
    return bytes(cv2.imencode(".jpg", np.full((480, 640, 3), 90, np.uint8))[1])


SAMPLED_DTYPES = ("BF16", "BYTES", "UINT64")
"""No JSON form; elements of any length; numbers beyond what a float holds. The codecs are tested with all types."""


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=[] if name in SAMPLED_DTYPES else pytest.mark.full) for name in sorted(DTYPES)],
)
def datatype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def browser(browsers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browsers.open_browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened
