"""Fleet of boxes on this machine: a publisher, a web server with its site, servers that follow it, and clients that ask
the servers without a pause for the whole test."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tritonclient.grpc
import tritonclient.http
from onnx import TensorProto, helper

from edge_server.plugins.fleet.follow.installed_models import MARK
from edge_server.plugins.fleet.release import SAMPLE_NAME
from tests.kit import site
from tests.kit.infer_input import infer_input
from tests.kit.server import COMMAND
from tests.kit.site import Handler


def write_model(folder: Path, factor: float, *, expected: float | None = None, slow: bool = False) -> None:
    """Write a model that multiplies X by `factor`, with a sample whose answer is `expected` times ones.

    A slow one takes some 100 times as long for the same outputs.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "1").mkdir(parents=True)
    rows = helper.make_tensor_value_info("X", TensorProto.FLOAT, ["n", 4])
    answers = helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["n", 4])
    values = [helper.make_tensor("k", TensorProto.FLOAT, [1], [factor])]
    nodes = [helper.make_node("Mul", ["X", "k"], ["Y"])]
    if slow:
        values += [
            helper.make_tensor("size", TensorProto.INT64, [2], [700, 700]),
            helper.make_tensor("zero", TensorProto.FLOAT, [1], [0.0]),
        ]
        nodes = [
            helper.make_node("ReduceMax", ["X"], ["largest"], keepdims=1),
            helper.make_node("Expand", ["largest", "size"], ["matrix"]),
            helper.make_node("MatMul", ["matrix", "matrix"], ["product"]),
            helper.make_node("ReduceMax", ["product"], ["sum"], keepdims=1),
            helper.make_node("Mul", ["sum", "zero"], ["nothing"]),
            helper.make_node("Mul", ["X", "k"], ["fast"]),
            helper.make_node("Add", ["fast", "nothing"], ["Y"]),
        ]
    graph = helper.make_graph(nodes, "g", [rows], [answers], values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    onnx.save(model, folder / "1" / "model.onnx")
    ones = np.ones((1, 4), np.float32)
    np.savez(folder / SAMPLE_NAME, X=ones, **{"expected.Y": ones * (factor if expected is None else expected)})


class Publisher:
    """The publisher's machine: a folder of models, keys, and the site, which the command line writes."""

    def __init__(self, folder: Path, rollout: str, broker: str = "") -> None:
        """`broker`: URL of the MQTT broker to which the boxes report; "": they are asked over HTTP."""
        self.folder = folder
        self.broker = broker
        self.model = folder / "models" / "m"
        self.site, self.keys = folder / "site", folder / "keys"
        self.boxes_file = folder / "boxes.txt"
        self.rollout = rollout

    def publish(self, *arguments: str) -> str:
        (self.model.parent / "rollout.toml").write_text(self.rollout)
        code, output = self._run("publish", str(self.model.parent), str(self.site), f"--keys={self.keys}", *arguments)
        assert code == 0, output
        return output

    def lead(self, action: str, *more: str) -> tuple[int, str]:
        """Run `fleet rollout`. Return its exit code and output."""
        more = (*more, f"--keys={self.keys}") if action != "status" else more
        more = (*more, f"--mqtt={self.broker}") if self.broker else more
        return self._run("fleet", "rollout", action, str(self.site), str(self.boxes_file), "--timeout=20", *more)

    def _run(self, *arguments: str) -> tuple[int, str]:
        environment = {**os.environ, "COLUMNS": "1000"}
        done = subprocess.run(
            [COMMAND, *arguments], cwd=self.folder, capture_output=True, text=True, timeout=100, env=environment
        )
        assert done.returncode in (0, 1), done.stderr
        return done.returncode, done.stdout + done.stderr


class _Files(Handler, http.server.SimpleHTTPRequestHandler):
    server: Site

    def translate_path(self, path: str) -> str:
        self.directory = str(self.server.folder)
        return super().translate_path(path)


class Site(site.Site):
    """Web server of static files. `folder` may be exchanged while it runs, as an attacker would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(_Files)


class Load:
    """Clients that ask the servers in turns, over HTTP and gRPC, and count each answer by what it says."""

    def __init__(self, servers: Sequence[Any], pause_s: float) -> None:
        """`pause_s`: between two requests of a client."""
        self._pause_s = pause_s
        self.answers: Counter[str] = Counter()
        """Factor of the model that answered, or the error -> number."""
        self._is_done = threading.Event()
        self._lock = threading.Lock()
        calls = [
            functools.partial(ask, servers[first::2])
            for ask in (self._ask_http, self._ask_grpc)
            for first in range(min(2, len(servers)))
        ]
        self._threads = [threading.Thread(target=call) for call in calls]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        for thread in self._threads:
            thread.join()

    def _ask_http(self, servers: Sequence[Any]) -> None:
        self._ask(tritonclient.http, [tritonclient.http.InferenceServerClient(server.http) for server in servers])

    def _ask_grpc(self, servers: Sequence[Any]) -> None:
        self._ask(tritonclient.grpc, [tritonclient.grpc.InferenceServerClient(server.grpc) for server in servers])

    def _ask(self, package: Any, clients: Sequence[Any]) -> None:
        tensor = infer_input(package, "X", np.ones((1, 4), np.float32))
        while not self._is_done.is_set():
            for client in clients:
                try:
                    answer = f"{client.infer('m', [tensor]).as_numpy('Y')[0, 0]:g}"
                except Exception as error:  # noqa: BLE001 - whatever a client raises is a failed request
                    answer = f"{package.__name__}: {error}"
                with self._lock:
                    self.answers[answer] += 1
                self._is_done.wait(self._pause_s)
        for client in clients:
            client.close()


class Box:
    """A model repository, and while it runs its server."""

    def __init__(self, folder: Path, name: str, start: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        """`start` starts the server of this box."""
        self.folder = folder
        self.name = name
        self.server: Any = None
        self.address = ""
        self._start = start
        self._running = contextlib.ExitStack()

    def start(self) -> None:
        self.server = self._running.enter_context(self._start())
        self.address = self.server.http

    def stop(self) -> None:
        self._running.close()
        self.server = None

    def report(self) -> dict[str, Any]:
        plugins = self.server.ask("/edge/v1/plugins")[1]["plugins"]
        found: dict[str, Any] = next(plugin["reports"]["follow"] for plugin in plugins if "follow" in plugin["reports"])
        return found

    def installed(self, model: str = "m") -> str:
        """Return the release in the model's folder, "" if there is none."""
        try:
            return str(json.loads((self.folder / model / MARK).read_bytes())["path"])
        except FileNotFoundError:
            return ""


class Fleet:
    """Publisher, site and boxes box-01, box-02 and so on. All but the last have release m/1 from the installation."""

    def __init__(self, folder: Path, count: int, interval_s: int, rollout: str, serve: Any, broker: str = "") -> None:
        """`interval_s`: most seconds between two looks of a box at the site. `broker`: see Publisher."""
        self.interval_s = interval_s
        self.publisher = Publisher(folder, "", broker)
        write_model(self.publisher.model, 1.0)
        self.publisher.publish()
        self.publisher.rollout = rollout  # from the next release on
        root = folder / "root.json"
        shutil.copy(self.publisher.site / "metadata" / "1.root.json", root)
        self.site = Site(self.publisher.site)
        self.boxes = [self._box(f"box-{number:02}", folder, root, serve) for number in range(1, count + 1)]

    def _box(self, name: str, folder: Path, root: Path, serve: Any) -> Box:
        models = folder / "boxes" / name
        flags = (
            f"--follow={self.site.url}", f"--follow-root={root}", f"--follow-interval-secs={self.interval_s}",
            f"--box-id={name}", *([f"--follow-mqtt={self.publisher.broker}"] if self.publisher.broker else []),
        )  # fmt: skip
        return Box(models, name, lambda: serve(models, *flags))

    @contextlib.contextmanager
    def running(self, count: int) -> Iterator[None]:
        """Let the first `count` boxes run, each from a copy of one disk. All that run at the end are stopped."""
        with self.site:
            try:
                first, *others = self.boxes
                first.folder.mkdir(parents=True)
                self._install(first)
                for box in others[:-1]:
                    shutil.copytree(first.folder, box.folder)
                others[-1].folder.mkdir()
                with ThreadPoolExecutor(4) as pool:
                    list(pool.map(Box.start, self.boxes[:count]))
                self.list_boxes()
                yield
            finally:
                with ThreadPoolExecutor(8) as pool:
                    list(pool.map(Box.stop, self.boxes))

    def _install(self, box: Box) -> None:
        """Put the newest release onto the disk of a box that does not run."""
        root = self.publisher.folder / "root.json"
        command = [
            COMMAND, "follow", self.site.url, f"--root={root}", f"--model-repository={box.folder}",
            f"--box-id={box.name}", "--once",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=100)

    def list_boxes(self) -> None:
        """Write boxes.txt: the boxes that run, and those that ran; over MQTT their names."""
        names = [box.name if self.publisher.broker else box.address for box in self.boxes if box.address]
        self.publisher.boxes_file.write_text("\n".join(names))

    @property
    def up(self) -> list[Box]:
        return [box for box in self.boxes if box.server is not None]

    @staticmethod
    def wait(condition: Callable[[], bool], limit_s: float = 400.0) -> float:
        """Wait until the condition is true, and return the seconds that it took. Raises AssertionError."""
        begin_s = time.monotonic()
        while not condition():
            assert time.monotonic() - begin_s < limit_s, "it did not come true"
            time.sleep(0.1)
        return time.monotonic() - begin_s
