"""Publisher, site and box of signed releases, in this process, and waiting for what other threads do."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edge_server.plugins.fleet.follow.follow_loop import make_follower
from edge_server.plugins.fleet.follow.follower import Follower, NoServer
from edge_server.plugins.fleet.follow.installed_models import InstalledModels
from edge_server.plugins.fleet.release import SAMPLE_NAME
from edge_server.plugins.fleet.settings import FollowConfig
from tests.kit.site import Handler, Site

PATIENCE_S = 60.0
PAGE_BYTES = 4096


def write_model(folder: Path, factor: float, *, expected: float | None = None, filler: int = 0) -> None:
    """Write a model that multiplies X by `factor`, with a sample whose answer is `expected` times ones."""
    (folder / "1").mkdir(parents=True, exist_ok=True)
    rows = helper.make_tensor_value_info("X", TensorProto.FLOAT, ["n", 4])
    answers = helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["n", 4])
    values = [helper.make_tensor("k", TensorProto.FLOAT, [1], [factor])]
    graph = helper.make_graph([helper.make_node("Mul", ["X", "k"], ["Y"])], "g", [rows], [answers], values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    onnx.save(model, folder / "1" / "model.onnx")
    ones = np.ones((1, 4), np.float32)
    np.savez(folder / SAMPLE_NAME, X=ones, **{"expected.Y": ones * (factor if expected is None else expected)})
    if filler:
        (folder / "notes.bin").write_bytes(np.random.default_rng(0).bytes(filler))


class Publication:
    """The publisher's folders: models, keys, and the site of static files, which `url` serves over HTTP."""

    def __init__(self, folder: Path) -> None:
        self.models, self.site, self.keys = folder / "models", folder / "site", folder / "keys"
        self.models.mkdir()
        self.root = folder / "root.json"
        self.url = ""
        self.requests: list[tuple[str, str | None]] = []
        self.cut_after: int | None = None
        """Close the connection after so many bytes of a body."""
        self.has_ranges = True

    def publish(self, rollout: str = "", *arguments: str, now: datetime | None = None) -> None:
        from edge_server.plugins.fleet.publish import command as publish_command

        (self.models / publish_command.ROLLOUT_NAME).write_text(rollout)
        publish_command.run([str(self.models), str(self.site), f"--keys={self.keys}", *arguments])
        if not self.root.exists():
            shutil.copy(self.site / "metadata" / "1.root.json", self.root)

    def release(self, factor: float, rollout: str = "", *, name: str = "m", **model: Any) -> None:
        """Write a model as `write_model` does, and publish."""
        write_model(self.models / name, factor, **model)
        self.publish(rollout)


@pytest.fixture
def publication(tmp_path: Path) -> Iterator[Publication]:
    made = Publication(tmp_path)

    class Answers(Handler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range") if made.has_ranges else None
            made.requests.append((self.path, asked))
            try:
                content = (made.site / self.path.lstrip("/")).read_bytes()
            except OSError:
                self.send_error(404)
                return
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            self.send_response(206 if asked else 200)
            if made.has_ranges:
                self.send_header("Accept-Ranges", "bytes")
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start:][: made.cut_after])
            self.close_connection = True

    with Site(Answers) as site:
        made.url = site.url
        yield made


class BoxUnderTest:
    """The model repository of a box, and its follower."""

    def __init__(self, folder: Path, publication: Publication) -> None:
        folder.mkdir()
        self.folder = folder
        self.publication = publication
        self.models = InstalledModels(folder)

    def follower(self, **settings: Any) -> Follower:
        config = FollowConfig(
            **{"url": self.publication.url, "root": str(self.publication.root), "box": "box-1", **settings}
        )
        return make_follower(config, self.models, Path("/nowhere"), NoServer())

    def follow(self, **settings: Any) -> Follower:
        """Do one round as a new process does, and return the follower."""
        with self.models.locked():
            follower = self.follower(**settings)
            follower.begin()
            follower.judge_probations()
            follower.follow_once()
        return follower

    def factor(self, model: str = "m") -> float | None:
        """Return what the installed model multiplies by; None if there is none."""
        path = self.folder / model / "1" / "model.onnx"
        return float(onnx.numpy_helper.to_array(onnx.load(path).graph.initializer[0])[0]) if path.exists() else None


@pytest.fixture
def box(tmp_path: Path, publication: Publication) -> BoxUnderTest:
    return BoxUnderTest(tmp_path / "box", publication)


@pytest.fixture
def add_model() -> Callable[..., None]:
    return write_model


@pytest.fixture
def new_box(tmp_path: Path, publication: Publication) -> Callable[[str], BoxUnderTest]:
    return lambda name: BoxUnderTest(tmp_path / name, publication)


@pytest.fixture
def utc_now() -> datetime:
    return datetime.now(timezone.utc)


@contextlib.contextmanager
def filled(disk: Path, left_bytes: int) -> Iterator[None]:
    """Another program's file, which leaves so many bytes."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        free = os.statvfs(disk).f_bavail * PAGE_BYTES
        os.posix_fallocate(file.fileno(), 0, free - left_bytes)
    try:
        yield
    finally:
        filler.unlink()
