"""Cost as work grows, with the test extra installed: memory and processor time of each further model, connection,
camera and request a second, as tables and curves.

`python tests/bench/scaling.py [CURVE ...] [--rounds=N] [--short] [--beside=FOLDER] [--pictures=FOLDER] [--json=FILE]`

- models: 1 to 1,000 of them, on the builtin backend and on ONNX Runtime. Start, memory, idle processor time, requests
  to all in turn, one model's reload, the repository index, the page of metrics, and the removal of all.
- connections: 1 to 2,000 kept open, each with one small request in turn.
- cameras: 1 to 256 frame streams of 64x48 pixels, all on one model, twice a second each.
- rate: one robot's small requests, 10 to 1,000 a second.

What one more unit costs is the difference to the smallest size, divided by the number of units between them. `--beside`
also measures the source tree in a folder, such as that of an earlier commit, in turns. `--short` takes few and small
sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import resource
import socket
import statistics
import struct
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import attacks
import harness
import numpy as np
import onnx
import short
from onnx import TensorProto, helper

from edge_server.client import AioFrameStream, Frame, FrameHeader
from edge_server.plugins.tuning.svg_charts import COLORS, ChartCurve, CurvePanel, draw_panels

SMALL = np.arange(16, dtype=np.float32)
WIDTH, HEIGHT, CAMERA_FPS = 64, 48, 2.0
SETTLE_S, PATIENCE_S = 2.0, 120.0
"""How long a server that is ready finishes its start, and how long a change may take."""
TENSORS = """
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
"""
CAMERA_MODEL = f"""
backend: "onnxruntime"
max_batch_size: 16
input {{ name: "INPUT0" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, {HEIGHT}, {WIDTH} ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 3 ] }}
dynamic_batching {{ }}
parameters {{ key: "image_fit" value {{ string_value: "stretch" }} }}
parameters {{ key: "image_color" value {{ string_value: "bgr" }} }}
"""


@dataclass(frozen=True)
class Extent:
    """Sizes of the curves, and how long each measurement takes."""

    models: Sequence[int] = (1, 10, 100, 300, 1000)
    connections: Sequence[int] = (1, 10, 100, 500, 2000)
    cameras: Sequence[int] = (1, 16, 64, 128, 256)
    rates: Sequence[int] = (10, 50, 200, 1000)
    idle_s: float = 15.0
    """A period of full scans of the repository, so that one is in it."""
    turn_s: float = 1.0
    paced_s: float = 3.0
    reloads: int = 3


SHORT = Extent((1, 60), (1, 200), (1, 4), (10, 200), 1.0, 0.3, 0.5, 1)
MIN_FURTHER = 50
"""Fewest units among which a difference is divided: two starts of the same server differ by some hundred kB."""

Start = Callable[[Path], AbstractContextManager[harness.Server]]
"""Starts a server on a repository."""
Figures = dict[str, float]


class Point(NamedTuple):
    """What was measured at one size. `way` is the backend or the protocol."""

    way: str
    size: int
    figures: Figures


# -- one server


def wakeups(server: harness.Server) -> int:
    """Return how often the server's threads have waited."""
    statuses = [path.read_text() for path in Path(f"/proc/{server.pid}/task").glob("*/status")]
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in statuses)


def thread_count(server: harness.Server) -> int:
    return sum(1 for _ in Path(f"/proc/{server.pid}/task").iterdir())


def idle(servers: Sequence[harness.Server], seconds: float) -> list[Figures]:
    """Return memory, and processor time and wake-ups a second, of servers that have nothing to do."""
    time.sleep(min(seconds, 1.0))
    before = [(where.cpu_s(), wakeups(where)) for where in servers]
    time.sleep(seconds)
    return [
        {
            "memory_kb": where.memory_mb()["Pss"] * 1000,
            "idle_us": (where.cpu_s() - cpu_s) / seconds * 1e6,
            "idle_wakeups": (wakeups(where) - woken) / seconds,
            "threads": thread_count(where),
        }
        for where, (cpu_s, woken) in zip(servers, before, strict=True)
    ]


def cpu_us_of(server: harness.Server, call: Callable[[], object], count: int = 5) -> float:
    """Return the server's processor time for one call."""
    call()
    before = server.cpu_s()
    for _ in range(count):
        call()
    return (server.cpu_s() - before) / count * 1e6


def until(change: Callable[[], object], is_done: Callable[[], bool]) -> float:
    """Make a change, and return the seconds until it is done."""
    began = time.monotonic()
    change()
    while not is_done():
        if time.monotonic() - began > PATIENCE_S:
            raise SystemExit(f"the change was not done after {PATIENCE_S:g} s")
        time.sleep(0.02)
    return time.monotonic() - began


# -- connections that cost their client little


class Connection(Protocol):
    """A connection that stays open."""

    def ask(self, model: str) -> None:
        """Send a small request, and wait for its answer."""

    def close(self) -> None: ...


class GrpcConnection:
    """HTTP/2 connection with gRPC calls, one at a time: unary, or all as messages of one stream."""

    def __init__(self, server: harness.Server, *, streams: bool = False) -> None:
        self._socket = attacks.Target(server.http, server.grpc, 0.0).connect()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()
        self._numbers = itertools.count(1, 2)
        self._stream = next(self._numbers) if streams else 0
        if self._stream:
            self._socket.sendall(attacks.headers(self._stream, attacks.request_block("ModelStreamInfer")))

    def ask(self, model: str) -> None:
        message = _message(model)
        body = struct.pack(">BI", 0, len(message)) + message
        if self._stream:
            self._socket.sendall(attacks.frame(attacks.DATA, 0, self._stream, body))
        else:
            data = attacks.frame(attacks.DATA, attacks.END_STREAM, number := next(self._numbers), body)
            self._socket.sendall(attacks.headers(number, attacks.request_block("ModelInfer")) + data)
        answer = b""
        while True:
            kind, flags, payload = self._frame()
            if kind == attacks.DATA:
                answer += payload
            if (self._stream and answer) or (kind == attacks.HEADERS and flags & attacks.END_STREAM):
                break
        if SMALL.tobytes() not in answer:
            raise SystemExit(f"refused: {answer!r} {payload!r}")

    def close(self) -> None:
        self._socket.close()

    def _frame(self) -> tuple[int, int, bytes]:
        while len(self._received) < 9 or len(self._received) < 9 + int.from_bytes(self._received[:3], "big"):
            self._received += _receive(self._socket)
        end = 9 + int.from_bytes(self._received[:3], "big")
        found = self._received[3], self._received[4], bytes(self._received[9:end])
        del self._received[:end]
        return found


class HttpConnection:
    """HTTP/1.1 connection that is kept alive."""

    def __init__(self, server: harness.Server) -> None:
        self._open = contextlib.ExitStack()
        self._send = self._open.enter_context(short.http_sender(server))

    def ask(self, model: str) -> None:
        self._send(f"/v2/models/{model}/infer", *_BODY)

    def close(self) -> None:
        self._open.close()


_BODY = short.binary_body(SMALL)
_MESSAGES: dict[str, bytes] = {}
CONNECTIONS: Mapping[str, Callable[[harness.Server], Connection]] = {"gRPC": GrpcConnection, "HTTP": HttpConnection}
ROBOTS: Mapping[str, Callable[[harness.Server], Connection]] = {
    **CONNECTIONS,
    "gRPC stream": partial(GrpcConnection, streams=True),
}


def _message(model: str) -> bytes:
    if model not in _MESSAGES:
        _MESSAGES[model] = short.message(model, "INPUT0", SMALL)
    return _MESSAGES[model]


def _receive(sock: socket.socket) -> bytes:
    data = sock.recv(1 << 16)
    if not data:
        raise SystemExit("the server closed the connection")
    return data


def ask_all(server: harness.Server, calls: Sequence[harness.Call], seconds: float) -> float:
    """Make the calls in turn, each at least once after a first pass; return the server's processor time for one."""
    for call in calls:
        call()
    done, before, end_s = 0, server.cpu_s(), time.monotonic() + seconds
    for call in itertools.cycle(calls):
        call()
        done += 1
        if done >= len(calls) and time.monotonic() > end_s:
            break
    return (server.cpu_s() - before) / done * 1e6


# -- the curves


def measure_models(start: Start, extent: Extent) -> Iterator[Point]:
    for way in ("builtin", "ONNX Runtime"):
        with contextlib.ExitStack() as stack:
            folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in extent.models]
            servers = []
            for size, folder in zip(extent.models, folders, strict=True):
                for name in _names(size):
                    write_small(folder / "models", name, way)
                where = stack.enter_context(start(folder / "models"))
                servers.append((size, folder, where, where.cpu_s()))
            rest = idle([where for _, _, where, _ in servers], extent.idle_s)
            for (size, folder, where, start_cpu_s), figures in zip(servers, rest, strict=True):
                figures |= {"start_ms": where.start_s * 1000, "start_cpu_ms": start_cpu_s * 1000}
                yield Point(way, size, figures | _model_figures(where, folder, size, way, extent))


def _names(count: int) -> list[str]:
    return [f"m{number:04}" for number in range(count)]


def _config(way: str, mark: str = "") -> str:
    backend = "identity" if way == "builtin" else "onnxruntime"
    return f'backend: "{backend}"\n{TENSORS}parameters {{ key: "mark" value {{ string_value: "{mark}" }} }}\n'


def write_small(repository: Path, name: str, way: str = "builtin") -> None:
    harness.write_model(repository, name, _config(way), {} if way == "builtin" else {"model.onnx": _IDENTITY})


def _onnx(node: onnx.NodeProto, given: Sequence[int | str], made: Sequence[int | str]) -> bytes:
    tensors = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("INPUT0", given), ("OUTPUT0", made))
    ]
    graph = helper.make_graph([node], "small", tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


_IDENTITY = _onnx(helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"]), [16], [16])
_MEAN = _onnx(
    helper.make_node("ReduceMean", ["INPUT0"], ["OUTPUT0"], axes=[2, 3], keepdims=0), ["N", 3, HEIGHT, WIDTH], ["N", 3]
)


def _model_figures(where: harness.Server, folder: Path, size: int, way: str, extent: Extent) -> Figures:
    figures = {}
    for wire, connect in CONNECTIONS.items():
        with contextlib.closing(connect(where)) as connection:
            calls = [partial(connection.ask, name) for name in _names(size)]
            figures[f"{wire}_us"] = ask_all(where, calls, extent.turn_s)
    figures["index_us"] = cpu_us_of(where, partial(_ready_models, where))
    figures["metrics_us"] = cpu_us_of(where, partial(_read, f"http://{where.metrics}/metrics"))
    models = folder / "models"
    reloads = [_reload(where, models / "m0000", way, str(mark)) for mark in range(extent.reloads)]
    for name, column in zip(("reload_ms", "reload_cpu_ms"), zip(*reloads, strict=True), strict=True):
        figures[name] = statistics.median(column) * 1000
    before = where.cpu_s()
    figures["remove_ms"] = until(partial(_remove_all, folder), lambda: not _ready_models(where)) * 1000
    figures["remove_cpu_ms"] = (where.cpu_s() - before) * 1000
    return figures


def _read(url: str, body: bytes | None = None) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=PATIENCE_S) as reply:
        return bytes(reply.read())


def _ready_models(where: harness.Server) -> int:
    return len(json.loads(_read(f"http://{where.http}/v2/repository/index", b'{"ready": true}')))


def _reload(where: harness.Server, model: Path, way: str, mark: str) -> tuple[float, float]:
    """Change a model's configuration as an editor does; return the seconds until it serves, and the server's CPU
    seconds."""
    new = model / ".config.pbtxt"
    new.write_text(f'name: "{model.name}"\n{_config(way, mark)}')

    def serves() -> bool:
        parameters = where.get(f"/v2/models/{model.name}/config")["parameters"]
        return bool(parameters["mark"]["string_value"] == mark)

    before = where.cpu_s()
    took_s = until(lambda: new.rename(model / "config.pbtxt"), serves)
    return took_s, where.cpu_s() - before


def _remove_all(folder: Path) -> None:
    (folder / "aside").mkdir()
    for model in list((folder / "models").iterdir()):
        model.rename(folder / "aside" / model.name)


def measure_connections(start: Start, extent: Extent) -> Iterator[Point]:
    with tempfile.TemporaryDirectory() as name:
        write_small(Path(name), "small")
        for way, connect in CONNECTIONS.items():
            with start(Path(name)) as where, contextlib.ExitStack() as stack:
                time.sleep(SETTLE_S)
                calls: list[harness.Call] = []
                for size in extent.connections:
                    before, count = where.cpu_s(), len(calls)
                    while len(calls) < size:
                        connection = stack.enter_context(contextlib.closing(connect(where)))
                        calls.append(partial(connection.ask, "small"))
                        calls[-1]()
                    open_us = (where.cpu_s() - before) / (size - count) * 1e6
                    (figures,) = idle([where], extent.idle_s / 3)
                    if count:  # the first request of a server costs more than any later one
                        figures["open_us"] = open_us
                    yield Point(way, size, figures | {"request_us": ask_all(where, calls, extent.turn_s)})


def measure_cameras(start: Start, extent: Extent) -> Iterator[Point]:
    with tempfile.TemporaryDirectory() as name:
        harness.write_model(Path(name), "mean", CAMERA_MODEL, {"model.onnx": _MEAN})
        with start(Path(name)) as where:
            yield from asyncio.run(_cameras(where, extent))


async def _cameras(where: harness.Server, extent: Extent) -> list[Point]:
    """Open more and more streams; return their figures at rest, and with frames."""
    picture = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8).tobytes()
    streams: list[AioFrameStream] = []
    readers: list[asyncio.Task[None]] = []
    ages: list[float] = []
    sent: dict[tuple[int, int], float] = {}
    numbers = itertools.count(1)

    async def send(number: int, frames: int) -> None:
        began = time.perf_counter() + number / len(streams) / CAMERA_FPS
        for turn in range(frames):
            await asyncio.sleep(max(began + turn / CAMERA_FPS - time.perf_counter(), 0.0))
            seq = next(numbers)
            sent[number, seq] = time.perf_counter()
            streams[number].send(Frame(FrameHeader(seq=seq), HEIGHT, WIDTH, "bgr8", WIDTH * 3, data=picture))

    async def receive(number: int) -> None:
        async for result in streams[number].results():
            if result.error:
                raise SystemExit(f"a frame failed: {result.error}")
            ages.append(time.perf_counter() - sent[number, result.header.seq])

    async def open_streams(count: int) -> None:
        """Open streams until there are `count`, each with its first frame."""
        opened = range(len(streams), count)
        ages.clear()
        for number in opened:
            streams.append(AioFrameStream(where.grpc, "mean", reconnects=False))
            readers.append(asyncio.create_task(receive(number)))
        await asyncio.gather(*(send(number, 1) for number in opened))
        while len(ages) < len(opened):
            await asyncio.sleep(0.02)
            for reader in readers:
                if reader.done():
                    reader.result()

    points = []
    frames = max(1, int(extent.paced_s * CAMERA_FPS))
    try:
        for count in extent.cameras:
            await open_streams(count)
            await asyncio.sleep(SETTLE_S)
            (figures,) = await asyncio.to_thread(idle, [where], extent.idle_s / 3)
            ages.clear()
            before = where.cpu_s()
            await asyncio.gather(*(send(number, frames) for number in range(count)))
            await asyncio.sleep(0.5)
            figures["frame_us"] = (where.cpu_s() - before) / max(len(ages), 1) * 1e6
            figures["answered"] = len(ages) / (frames * count)
            figures |= {f"p{part}_ms": harness.percentile(ages, part / 100) * 1000 for part in (50, 99)}
            points.append(Point("frame stream", count, figures))
    finally:
        for stream in streams:
            await stream.close()
        await asyncio.gather(*readers)
    return points


def measure_rates(start: Start, extent: Extent) -> Iterator[Point]:
    with tempfile.TemporaryDirectory() as name:
        write_small(Path(name), "small")
        with start(Path(name)) as where:
            time.sleep(SETTLE_S)
            for way, connect in ROBOTS.items():
                for rate in extent.rates:
                    with contextlib.closing(connect(where)) as connection:
                        call = partial(connection.ask, "small")
                        for _ in range(20):
                            call()
                        yield Point(way, rate, _paced(where, call, rate, extent.paced_s))


def _paced(where: harness.Server, call: harness.Call, rate: int, seconds: float) -> Figures:
    """Send at a steady rate, one request at a time."""
    took, before, woken, began = [], where.cpu_s(), wakeups(where), time.perf_counter()
    for number in range(max(1, int(rate * seconds))):
        time.sleep(max(0.0, began + number / rate - time.perf_counter()))
        sent = time.perf_counter()
        call()
        took.append(time.perf_counter() - sent)
    return {
        "request_us": (where.cpu_s() - before) / len(took) * 1e6,
        "wakeups": (wakeups(where) - woken) / len(took),
        "p50_ms": harness.percentile(took, 0.5) * 1000,
        "p99_ms": harness.percentile(took, 0.99) * 1000,
    }


CURVES: Mapping[str, Callable[[Start, Extent], Iterator[Point]]] = {
    "models": measure_models,
    "connections": measure_connections,
    "cameras": measure_cameras,
    "rate": measure_rates,
}


# -- tables and pictures


class Column(NamedTuple):
    """A column of a curve's table. `is_further`: the cost of each further unit. A title with `panel` is drawn."""

    title: str
    key: str
    scale: float = 1.0
    is_further: bool = False
    panel: str = ""

    def value(self, point: Point, smallest: Point) -> float:
        """Return the value at a point, not a number where it has none."""
        value = point.figures.get(self.key, math.nan) * self.scale
        if not self.is_further:
            return value
        units = point.size - smallest.size
        return math.nan if units < MIN_FURTHER else (value - smallest.figures[self.key] * self.scale) / units


FURTHER = partial(Column, is_further=True)
TABLES: Mapping[str, Sequence[Column]] = {
    "models": (
        Column("start, s", "start_ms", 1e-3),
        FURTHER("start, CPU ms", "start_cpu_ms", panel="start: CPU ms of each further model"),
        FURTHER("memory, kB", "memory_kb", panel="memory: kB of each further model"),
        FURTHER("threads", "threads"),
        FURTHER("idle, us/s", "idle_us", panel="idle: CPU µs a second of each further model"),
        Column("gRPC, us", "gRPC_us", panel="one request over gRPC: CPU µs"),
        Column("HTTP, us", "HTTP_us", panel="one request over HTTP: CPU µs"),
        Column("reload, s", "reload_ms", 1e-3),
        Column("reload, CPU ms", "reload_cpu_ms", panel="reload of one model: CPU ms"),
        FURTHER("index, us", "index_us", panel="index: CPU µs of each further model"),
        FURTHER("metrics, us", "metrics_us", panel="metrics page: CPU µs of each further model"),
        Column("removal of all, s", "remove_ms", 1e-3),
        FURTHER("removal, CPU ms", "remove_cpu_ms"),
    ),
    "connections": (
        FURTHER("memory, kB", "memory_kb", panel="memory: kB of each further connection"),
        FURTHER("idle, us/s", "idle_us", panel="idle: CPU µs a second of each further connection"),
        Column("opening, us", "open_us", panel="opening, with the first request: CPU µs"),
        Column("request, us", "request_us", panel="one request: CPU µs"),
    ),
    "cameras": (
        FURTHER("memory, kB", "memory_kb", panel="memory: kB of each further camera"),
        FURTHER("idle, us/s", "idle_us"),
        Column("frame, us", "frame_us", panel="one frame: CPU µs"),
        Column("answered, %", "answered", 100.0),
        Column("p50, ms", "p50_ms", panel="from the camera to its result, p50: ms"),
        Column("p99, ms", "p99_ms", panel="from the camera to its result, p99: ms"),
    ),
    "rate": (
        Column("request, us", "request_us", panel="one request: CPU µs"),
        Column("wake-ups", "wakeups", panel="one request: wake-ups of the server's threads"),
        Column("p50, ms", "p50_ms", panel="latency, p50: ms"),
        Column("p99, ms", "p99_ms", panel="latency, p99: ms"),
    ),
}
UNITS = {"rate": "requests a second"}


def medians(rounds: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the points of one round, each with the medians of all."""
    return [
        Point(
            same[0].way,
            same[0].size,
            {key: statistics.median(one.figures[key] for one in same) for key in same[0].figures},
        )
        for same in zip(*rounds, strict=True)
    ]


def by_way(points: Sequence[Point]) -> dict[str, list[Point]]:
    return {
        way: [point for point in points if point.way == way] for way in dict.fromkeys(point.way for point in points)
    }


def table(curve: str, points: Sequence[Point]) -> str:
    columns = TABLES[curve]
    rows = [
        (way, f"{point.size}", *(_number(column.value(point, some[0])) for column in columns))
        for way, some in by_way(points).items()
        for point in some
    ]
    return harness.markdown(("", UNITS.get(curve, curve), *(column.title for column in columns)), rows)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def picture(curve: str, points: Sequence[Point], facts: str) -> str:
    panels = [
        CurvePanel(
            column.panel,
            [
                ChartCurve(way, [(point.size, column.value(point, some[0])) for point in some], color)
                for (way, some), color in zip(by_way(points).items(), COLORS, strict=False)
            ],
            UNITS.get(curve, curve),
            is_log=True,
        )
        for column in TABLES[curve]
        if column.panel
    ]
    return draw_panels(f"Cost as {UNITS.get(curve, curve)} grow", panels, facts, columns=2)


def write_bytecode(start: Start) -> None:
    """Start a server once, so that the measured ones need not compile their modules."""
    with tempfile.TemporaryDirectory() as name:
        for way in ("builtin", "ONNX Runtime"):
            write_small(Path(name), way.partition(" ")[0], way)
        with start(Path(name)) as where:
            for connect in ROBOTS.values():
                with contextlib.closing(connect(where)) as connection:
                    connection.ask("builtin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", nargs="*", metavar="CURVE", help=f"of {', '.join(CURVES)}; all if none is named")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="another source tree")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="where the curves are drawn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures are written")
    given = parser.parse_args()
    curves = given.curves or list(CURVES)
    if unknown := set(curves) - set(CURVES):
        parser.error(f"expected {', '.join(CURVES)}, given {', '.join(sorted(unknown))}")
    # Each connection takes a descriptor of the client, and one of the server, which inherits the limit.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    extent = SHORT if given.short else Extent()
    starts: dict[str, Start] = {"": partial(harness.server, tree=harness.ROOT)}
    if given.beside is not None:
        starts[str(given.beside)] = partial(harness.server, tree=given.beside.absolute())
    facts, found = harness.machine(), {}
    with tempfile.TemporaryDirectory() as bytecode:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = bytecode
        for start in starts.values():
            write_bytecode(start)
        for curve in curves:
            rounds: dict[str, list[list[Point]]] = {tree: [] for tree in starts}
            for number, (tree, start) in itertools.product(range(given.rounds), starts.items()):
                rounds[tree].append(list(CURVES[curve](start, extent)))
                print(f"{curve}, round {number + 1} of {given.rounds} {tree}", file=sys.stderr, flush=True)
            for tree in starts:
                points = medians(rounds[tree])
                found[f"{curve} {tree}".strip()] = [point._asdict() for point in points]
                print(f"\n{table(curve, points)}\n{tree}", flush=True)
                if given.pictures is not None and not tree:
                    says = f"{facts['cores']} cores of {facts['processor']}, medians of {given.rounds} rounds"
                    (given.pictures / f"scaling_{curve}.svg").write_text(picture(curve, points, says))
    if given.json is not None:
        given.json.write_text(json.dumps({"facts": facts, "curves": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
