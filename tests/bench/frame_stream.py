"""Measurements of frame streams: `python tests/bench/frame_stream.py [--tables=cpu,stages,rate] [--rounds=N]`.

- cpu: CPU time of client and server for a frame of 640x480, one and four cameras of 30 frames a second, beside the bare
  runtime with the same preprocessing, which a plain loop calls at the same rate: raw bgr8, JPEG, shared memory, and
  RTSP, where the server opens the camera and the plain loop reads it. `tiny` is a network of microseconds.
- stages: where the CPU time of a frame goes, in server and client. Some functions of both are replaced by ones that
  measure their own CPU time, without that of measured functions that they call.
- rate: frames a second through one stream and through four beside the same loop at full speed, and the latency that the
  stream adds to one frame alone.

Everything is measured in turns, round after round, and medians are printed. Quote the ratios: absolute numbers depend
on the machine. Client and server share its cores, so the client's own cost is part of the stream's time. To measure a
change, run this file by the Python of each tree in turns. Needs the extra test; RTSP needs also the extra sources and
GStreamer's server, see tests/e2e/fetch_camera_servers.sh, whose CPU time counts for nobody.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
from harness import ROOT, Server, ended, free_ports, markdown, percentile, server, write_model

import edge_server
from edge_server.client import Delivery, Frame, FrameHeader, FrameStream, RegionSlice
from edge_server.core.model_spec import InputSpec, ModelSpec
from edge_server.core.tensor import DType
from edge_server.memory.malloc_settings import keep_big_blocks
from edge_server.plugins.cameras.sources.frame_encoding import encode_frame
from edge_server.plugins.cameras.sources.rtsp import open_rtsp
from edge_server.plugins.vision.image_plan import ImagePlan, make_image_plan
from edge_server.repository.model_config import pbtxt

BUNDLED = ROOT / "model_repository"
MODELS = ("efficientnet_lite0", "face_detection_yunet")
RUNTIMES = ("openvino", "onnxruntime")
THREADS = (0, 1)
"""Threads of the runtime: 0 is one for each core. With one, on two cores, a core is free for receiving and decoding;
with all, the stream's own computing slows the inference."""
SETTINGS = {"openvino": "INFERENCE_NUM_THREADS", "onnxruntime": "intra_op_thread_count"}
WIRES = ("raw", "jpeg", "shm")
CPU_CASES = (("tiny", 1), ("tiny", 4), ("efficientnet_lite0", 1), ("face_detection_yunet", 1))
"""Model and number of cameras. Two cores cannot run a real network 120 times a second beside clients and cameras."""
WIDTH, HEIGHT = 640, 480
TURN_S = 1.0
CAMERA_S = 3.0
FPS = 30.0
UNDER_WAY = 2
"""Frames on their way at once where throughput is measured: one that runs, one that is made ready meanwhile."""

TINY = """
backend: "onnxruntime"
max_batch_size: 0
input { name: "input" data_type: TYPE_FP32 dims: [ 1, 3, 224, 224 ] }
output { name: "mean" data_type: TYPE_FP32 dims: [ 1, 3, 1, 1 ] }
instance_group { count: 1 kind: KIND_CPU }
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
parameters { key: "image_fit" value { string_value: "stretch" } }
parameters { key: "image_scale" value { string_value: "1" } }
parameters { key: "image_mean" value { string_value: "127" } }
parameters { key: "image_stddev" value { string_value: "128" } }
"""
"""The mean of each channel: all that is left of the CPU time is for moving and preparing the frame."""


# -- the models


@contextlib.contextmanager
def repository() -> Iterator[Path]:
    """Every model once for each runtime and number of threads, with one instance as the bare loop has."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "models"
        for model, runtime, threads in itertools.product(MODELS, RUNTIMES, THREADS):
            target = folder / served_as(model, runtime, threads)
            (target / "1").mkdir(parents=True)
            shutil.copy(BUNDLED / model / "1/model.onnx", target / "1")
            shutil.copy(BUNDLED / model / "labels.txt", target)
            config = (BUNDLED / model / "config.pbtxt").read_text().replace(f'"{model}"', f'"{target.name}"', 1)
            config += f'\nbackend: "{runtime}"\ninstance_group {{ count: 1 kind: KIND_CPU }}\n'
            if threads:
                config += f'parameters {{ key: "{SETTINGS[runtime]}" value {{ string_value: "{threads}" }} }}\n'
            (target / "config.pbtxt").write_text(config)
        write_model(folder, "tiny", TINY, {"model.onnx": tiny_network().SerializeToString()})
        yield folder


def tiny_network() -> onnx.ModelProto:
    picture, mean = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("input", (1, 3, 224, 224)), ("mean", (1, 3, 1, 1)))
    )
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("GlobalAveragePool", ["input"], ["mean"])], "tiny", [picture], [mean]
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


def served_as(model: str, runtime: str, threads: int) -> str:
    return f"{model}_on_{threads or 'all'}_of_{runtime}"


# -- pictures on their way


@dataclass
class Pictures:
    """The same image in each encoding. `region` has a slot for each frame in flight, which a camera's driver would
    write."""

    pixels: np.ndarray
    jpeg: bytes
    region: shared_memory.SharedMemory
    name: str
    places: int = 4

    def frame(self, wire: str, seq: int) -> Frame:
        header = FrameHeader(seq=seq)
        if wire == "jpeg":
            return Frame(header, format="jpeg", data=self.jpeg)
        frame = Frame(header, HEIGHT, WIDTH, "bgr8", WIDTH * 3)
        if wire == "raw":
            frame.data = self.pixels.reshape(-1).data
            return frame
        offset = seq % self.places * self.pixels.nbytes
        frame.region = RegionSlice(self.name, offset, self.pixels.nbytes)
        return frame


@contextlib.contextmanager
def pictures(where: Server) -> Iterator[Pictures]:
    photo = cv2.imread(str(ROOT / "tests/data/coffee.jpg"))
    pixels = np.ascontiguousarray(cv2.resize(photo, (WIDTH, HEIGHT)))
    jpeg = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes()
    region = shared_memory.SharedMemory(create=True, size=Pictures.places * pixels.nbytes)
    try:
        np.ndarray((Pictures.places, *pixels.shape), np.uint8, region.buf)[:] = pixels
        path = "/v2/systemsharedmemory/region/bench"
        where.post(f"{path}/register", {"key": f"/{region.name.lstrip('/')}", "offset": 0, "byte_size": region.size})
        yield Pictures(pixels, jpeg, region, "bench")
        where.post(f"{path}/unregister", {})
    finally:
        region.close()
        region.unlink()


# -- the bare runtime


def plan_of(model: str) -> ImagePlan:
    text = TINY.encode() if model == "tiny" else (BUNDLED / model / "config.pbtxt").read_bytes()
    config = pbtxt.parse_text(text, model)
    declared = config.input[0]
    plan = make_image_plan(
        ModelSpec(
            name=model,
            backend="",
            platform="",
            max_batch_size=config.max_batch_size,
            inputs=(InputSpec(declared.name, DType.FP32, tuple(declared.dims), format="FORMAT_NCHW"),),
            outputs=(),
            instance_groups=(),
            parameters={key: value.string_value for key, value in config.parameters.items()},
        )
    )
    assert plan is not None
    return plan


def runtime_call(model: str, runtime: str, threads: int, name: str, array: np.ndarray) -> Callable[[], object]:
    """Return one inference on `array`, by the runtime's own API and with the server's settings."""
    path = str(BUNDLED / model / "1/model.onnx")
    if runtime == "onnxruntime" or model == "tiny":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.intra_op.spin_duration_us", "30")
        options.intra_op_num_threads = threads
        file = tiny_network().SerializeToString() if model == "tiny" else path
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        return lambda: session.run(None, {name: array})
    import openvino

    settings: dict[str, object] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    if threads:
        settings["INFERENCE_NUM_THREADS"] = threads
    request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
    request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
    return lambda: request.infer(share_outputs=True)


def bare_call(model: str, runtime: str, threads: int, wire: str, source: Pictures) -> Callable[[], object]:
    """Return the preprocessing of one frame and the inference on it, one after the other."""
    run = bare_frame_call(model, runtime, threads)
    frame = source.frame("jpeg" if wire == "jpeg" else "raw", 0)
    return lambda: run(frame)


def bare_frame_call(model: str, runtime: str, threads: int) -> Callable[[Frame], object]:
    plan = plan_of(model)
    row = np.zeros(plan.item_shape, np.float32)
    infer = runtime_call(model, runtime, threads, plan.input_name, row[None])

    def call(frame: Frame) -> None:
        plan.write(plan.read_frame(frame, memoryview(frame.data), model=model), row, model=model)
        infer()

    return call


# -- measuring


def bare_rate(call: Callable[[], object]) -> tuple[float, list[float], float]:
    """Return calls a second over one turn, seconds of each call, and CPU seconds of one."""
    call()
    took, cpu, began = [], time.process_time(), time.perf_counter()
    last = began
    while last < began + TURN_S:
        call()
        now = time.perf_counter()
        took.append(now - last)
        last = now
    return len(took) / (last - began), took, (time.process_time() - cpu) / len(took)


def stream_rate(where: Server, model: str, wire: str, source: Pictures, cameras: int) -> float:
    """Return results a second over one turn, of all cameras together.

    One camera has UNDER_WAY frames on their way at once, each of several has one.
    """
    depth = UNDER_WAY if cameras == 1 else 1
    answered = [0] * cameras
    is_over = threading.Event()

    def watch(number: int) -> None:
        sent = threading.Semaphore(depth)

        def frames() -> Iterator[Frame]:
            for seq in itertools.count():
                sent.acquire()
                if is_over.is_set():
                    return
                yield source.frame(wire, seq)

        with FrameStream(where.grpc, model, delivery=Delivery(depth=depth), keeps_all=True) as stream:
            for result in stream.results(frames()):
                check(result.error)
                answered[number] += 1
                sent.release()

    threads = [threading.Thread(target=watch, args=(number,)) for number in range(cameras)]
    for thread in threads:
        thread.start()
    while min(answered) < 5:  # the first frames find nothing warm
        time.sleep(0.01)
    began, before = time.perf_counter(), sum(answered)
    time.sleep(TURN_S)
    rate = (sum(answered) - before) / (time.perf_counter() - began)
    is_over.set()
    for thread in threads:
        thread.join()
    return rate


def stream_latencies(where: Server, model: str, wire: str, source: Pictures) -> list[float]:
    """Return seconds from sending a frame to its result, one frame at a time."""
    took: list[float] = []
    with FrameStream(where.grpc, model) as stream:
        stream.send(source.frame(wire, 1))
        end, sent = time.perf_counter() + TURN_S, 0.0
        for result in stream.results():
            now = time.perf_counter()
            check(result.error)
            if result.header.seq > 5:
                took.append(now - sent)
            if now > end:
                break
            frame = source.frame(wire, result.header.seq + 1)
            sent = time.perf_counter()
            stream.send(frame, copies=False)
    return took


def check(error: str) -> None:
    if error:
        raise SystemExit(f"a frame failed: {error}")


# -- stages

COUNTS_FLAG = "--stages-to="
REPLAYED = 900
"""Frames of a recording."""
_PLUGINS = "edge_server.plugins"
SERVER_STAGES = {
    "receive": ("edge_server.frontends.http2.connection:Http2Connection.on_event",),
    "message": (f"{_PLUGINS}.cameras.endpoints.stream_call:decode_client_message",),
    "queue": (
        f"{_PLUGINS}.cameras.endpoints.stream_call:FrameCall.on_message",
        f"{_PLUGINS}.cameras.streams.model_workers:ModelWorkers._next",
        f"{_PLUGINS}.cameras.streams.model_workers:ModelWorkers.adapt",
        f"{_PLUGINS}.cameras.streams.model_workers:ModelWorkers._run",
    ),
    "decode": (f"{_PLUGINS}.vision.image_plan:ImagePlan.read_frame",),
    "resize": (f"{_PLUGINS}.vision.image_plan:resized",),
    "normalise": (f"{_PLUGINS}.vision.image_plan:ImagePlan.write",),
    "submit": (f"{_PLUGINS}.cameras.streams.frame_pipeline:FramePipeline._ask",),
    "run": (
        "edge_server.backends.onnxruntime.session:OnnxSession.run",
        "edge_server.backends.openvino.session:OpenVinoSession.run",
    ),
    "heads": (f"{_PLUGINS}.cameras.streams.frame_pipeline:FramePipeline._result",),
    "encode": (f"{_PLUGINS}.cameras.endpoints.stream_call:encode_server_message",),
    "send": (f"{_PLUGINS}.cameras.endpoints.stream_call:FrameCall._flush",),
}
CLIENT_STAGES = {
    "read": (
        f"{_PLUGINS}.ros.recordings.frame_window:FrameWindow.take",
        f"{_PLUGINS}.ros.recordings.shared_pictures:SharedPictures.place",
    ),
    "offer": ("edge_server.client.stream_client:StreamClient.send",),
    "encode": ("edge_server.client.stream:frame_pieces",),
    "send": ("edge_server.client.http2_call:Http2ClientCall._send",),
    "receive": ("edge_server.client.http2_call:Http2ClientCall.__next__",),
    "decode": ("edge_server.client.stream_protocol:StreamProtocol.receive",),
    "write": (f"{_PLUGINS}.ros.recordings.replay:_TopicStream._receive",),
}
"""Stage -> functions, as "module:name". What a stage costs is the time in these functions without that in functions of
other stages that they call. The rest of a process's time is in no stage: threads that wake up, and what calls these."""


class Stages:
    """Measures the stages of this process. `spent_ns` has the CPU time of each stage."""

    def __init__(self, stages: Mapping[str, Sequence[str]]) -> None:
        self.spent_ns: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._nested = threading.local()
        for stage, functions in stages.items():
            for function in functions:
                module, _, path = function.partition(":")
                *owners, name = path.split(".")
                owner: Any = importlib.import_module(module)
                for part in owners:
                    owner = getattr(owner, part)
                setattr(owner, name, self._measured(stage, getattr(owner, name)))

    def _measured(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        nested, clock = self._nested, time.thread_time_ns

        def measured(*arguments: Any, **named: Any) -> Any:
            outer, nested.ns = getattr(nested, "ns", 0), 0
            began = clock()
            try:
                return function(*arguments, **named)
            finally:
                spent = clock() - began
                with self._lock:
                    self.spent_ns[stage] += spent - nested.ns
                nested.ns = outer + spent

        return measured


def run_measured(counts: Path, arguments: Sequence[str]) -> None:
    """Run the command `edge-server` with measured stages, and write their times to a file ten times a second."""
    from edge_server.cli.main import main as run_command

    measured = Stages(SERVER_STAGES if arguments[0] == "serve" else CLIENT_STAGES)
    replaced = counts.with_suffix(".new")
    is_over = threading.Event()

    def write() -> None:
        is_last = False
        while not is_last:
            is_last = is_over.wait(0.1)
            replaced.write_text(json.dumps({**measured.spent_ns, "all": time.process_time_ns()}))
            replaced.replace(counts)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        status = run_command(arguments)
    finally:
        is_over.set()
        writer.join()
    raise SystemExit(status)


def stage_times(folder: Path, rounds: int) -> None:
    print(f"\nCPU microseconds of a frame of {WIDTH}x{HEIGHT} by stage, tiny on onnxruntime: four cameras of {FPS:g} "
          "frames a second, and a recording at full speed; medians")  # fmt: skip
    there, here = folder.parent / "server.json", folder.parent / "client.json"
    stages = Stages(CLIENT_STAGES)
    found: dict[str, list[dict[str, float]]] = {}
    flags = ("--allow-client-shm=true", "--model-control-mode=explicit", "--load-model=tiny")
    with server(folder, *flags, program=measured_command(there)) as where, pictures(where) as source:
        for _, wire in itertools.product(range(rounds), WIRES):
            before: Counter[str] = Counter()
            cpu_of_streams(where, "tiny", 4, wire, source, partial(mark_stages, before, there, stages))
            took = stages_of_both(there, stages)
            took.subtract(before)
            found.setdefault(wire, []).append({name: ns / (4 * CAMERA_S * FPS) for name, ns in took.items()})
        for name, encoding in (("recording raw", ""), ("recording jpeg", "jpeg")):
            found[name] = [replay_stages(where, folder.parent, encoding, there, here) for _ in range(rounds)]
    rows = []
    for side, names in (("server", SERVER_STAGES), ("client", CLIENT_STAGES)):
        for each in itertools.chain.from_iterable(found.values()):
            each[f"{side} rest"] = each[f"{side} all"] - sum(each.get(f"{side} {name}", 0.0) for name in names)
        rows += [
            (name, *(f"{statistics.median(one.get(name, 0.0) for one in each) / 1000:.0f}" for each in found.values()))
            for name in (f"{side} {stage}" for stage in (*names, "rest", "all"))
        ]
    print(markdown(("stage", *found), rows))


def replay_stages(where: Server, home: Path, encoding: str, there: Path, here: Path) -> dict[str, float]:
    """Return the nanoseconds of each stage for a frame of a recording. The server's first frames are long past, the
    command's start counts as its rest."""
    from ros_replay import write_drive

    drive, output = home / f"drive_{encoding}", home / "labels.mcap"
    if not drive.exists():
        write_drive(drive, WIDTH, HEIGHT, encoding, REPLAYED)
    before = stages_now("server", there)
    command = [*measured_command(here), "ros", "replay", str(drive), "--model=tiny", f"--address={where.grpc}",
               f"--output={output}"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    output.unlink()
    time.sleep(0.15)
    took = stages_now("server", there)
    took.subtract(before)
    took.update(stages_now("client", here))
    return {name: ns / REPLAYED for name, ns in took.items()}


def mark_stages(counts: Counter[str], there: Path, here: Stages) -> None:
    counts.update(stages_of_both(there, here))


def stages_of_both(there: Path, here: Stages) -> Counter[str]:
    """Return the nanoseconds so far of each stage of the server, and of this client."""
    now = {"client all": time.process_time_ns()} | {f"client {name}": ns for name, ns in here.spent_ns.items()}
    time.sleep(0.15)
    return stages_now("server", there) + Counter(now)


def measured_command(counts: Path) -> list[str]:
    return [sys.executable, __file__, f"{COUNTS_FLAG}{counts}"]


def stages_now(side: str, counts: Path) -> Counter[str]:
    """Return the nanoseconds so far of each stage of a process that `run_measured`, and of all that it did."""
    return Counter({f"{side} {name}": ns for name, ns in json.loads(counts.read_text()).items()})


# -- rates


def beside_the_runtime(where: Server, source: Pictures, rounds: int) -> None:
    print(f"\nframes a second at most, and what the stream adds to the latency of one frame, {WIDTH}x{HEIGHT}")
    heads = (
        "model",
        "runtime",
        "threads",
        "wire",
        "bare fps",
        "stream fps",
        "ratio",
        "four fps",
        "ratio",
        "bare p50 ms",
        "added p50 ms",
        "added p99 ms",
    )
    rows = []
    for model, runtime, threads, wire in itertools.product(MODELS, RUNTIMES, THREADS, WIRES):
        figures = _beside(where, source, rounds, model, runtime, threads, wire)
        rows.append((model, runtime, str(threads or "all"), wire, *figures))
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(markdown(heads, rows))


def _beside(
    where: Server, source: Pictures, rounds: int, model: str, runtime: str, threads: int, wire: str
) -> list[str]:
    name = served_as(model, runtime, threads)
    call = bare_call(model, runtime, threads, wire, source)
    bare, one, four, p50, added50, added99 = [], [], [], [], [], []
    for _ in range(rounds):
        rate, took, _ = bare_rate(call)
        bare.append(rate)
        one.append(stream_rate(where, name, wire, source, 1))
        four.append(stream_rate(where, name, wire, source, 4))
        latencies = stream_latencies(where, name, wire, source)
        p50.append(percentile(took, 0.5))
        added50.append(percentile(latencies, 0.5) - percentile(took, 0.5))
        added99.append(percentile(latencies, 0.99) - percentile(took, 0.99))
    rates = [f"{statistics.median(bare):.1f}"]
    for many in (one, four):
        ratios = [streamed / alone for streamed, alone in zip(many, bare, strict=True)]
        rates += (f"{statistics.median(many):.1f}", f"{statistics.median(ratios):.2f}")
    times = [statistics.median(values) * 1000 for values in (p50, added50, added99)]
    return [*rates, *(f"{ms:.2f}" for ms in times)]


# -- CPU time


def cpu_time(where: Server, source: Pictures, folder: Path, rounds: int) -> None:
    print(f"\nCPU milliseconds for a frame of {WIDTH}x{HEIGHT} at {FPS:g} frames a second, tiny on onnxruntime, "
          f"others on {RUNTIMES[0]}; over: client + server - bare loop; fps: of each camera")  # fmt: skip
    heads = ("model", "cameras", "wire", "bare loop", "server", "client", "over", "least", "most", "fps")
    rows = []
    wires = (*WIRES, "rtsp") if os.environ.get("EDGE_TEST_CAMERA_SERVERS") else WIRES
    for (model, count), wire in itertools.product(CPU_CASES, wires):
        if wire == "rtsp":
            found = cpu_of_rtsp(folder, model, count, rounds)
        else:
            bare = bare_call(model, RUNTIMES[0], 0, wire, source)
            found = [
                (*cpu_of_streams(where, model, count, wire, source), cpu_of_loop(bare, count)) for _ in range(rounds)
            ]
        over = [server_ms + client_ms - bare_ms for server_ms, client_ms, _, bare_ms in found]
        server_ms, client_ms, fps, bare_ms = (statistics.median(column) for column in zip(*found, strict=True))
        numbers = (bare_ms, server_ms, client_ms, statistics.median(over), min(over), max(over))
        rows.append((model, str(count), wire, *(f"{value:.2f}" for value in numbers), f"{fps:.1f}"))
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(markdown(heads, rows))


def served_name(model: str) -> str:
    return model if model == "tiny" else served_as(model, RUNTIMES[0], 0)


def cpu_of_streams(
    where: Server, model: str, count: int, wire: str, source: Pictures, begin: Callable[[], None] = lambda: None
) -> tuple[float, float, float]:
    """Return CPU milliseconds of server and client for a frame, and results a second of each of `count` cameras.

    `begin` is called before the frames that count.
    """
    answered = [0] * count
    warm = threading.Barrier(count + 1, timeout=30)

    def watch(number: int) -> None:
        frames = itertools.chain(paced(source, wire, 0.5), _at(warm), paced(source, wire, CAMERA_S))
        with FrameStream(where.grpc, served_name(model)) as stream:
            for result in stream.results(frames):
                check(result.error)
                answered[number] += 1

    threads = [threading.Thread(target=watch, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    # The first frames find nothing warm.
    while warm.n_waiting < count:
        time.sleep(0.01)
    begin()
    warm.wait()
    began, cpu_there, cpu_here, before = time.perf_counter(), where.cpu_s(), time.process_time(), sum(answered)
    for thread in threads:
        thread.join()
    passed, frames = time.perf_counter() - began, sum(answered) - before
    spent = ((where.cpu_s() - cpu_there) * 1000 / frames, (time.process_time() - cpu_here) * 1000 / frames)
    return (*spent, frames / passed / count)


def _at(barrier: threading.Barrier) -> Iterator[Frame]:
    """Wait at a barrier, and yield nothing."""
    barrier.wait()
    yield from ()


def cpu_of_loop(call: Callable[[], object], count: int) -> float:
    """Return CPU milliseconds of a call, made as often as `count` cameras have frames."""
    call()
    cpu, calls = time.process_time(), int(CAMERA_S * FPS * count)
    for _ in at_rate(FPS * count, calls):
        call()
    return (time.process_time() - cpu) * 1000 / calls


def cpu_of_rtsp(folder: Path, model: str, count: int, rounds: int) -> list[tuple[float, float, float, float]]:
    """Return CPU milliseconds of the server for a frame, 0 for the client, results a second of each camera, and CPU
    milliseconds of a plain loop that reads as many cameras."""
    found = []
    name = served_name(model)
    with rtsp_cameras(folder) as url:
        sources = "".join(f'[[sources]]\nname = "cam{n}"\nurl = "{url}"\nmodel = "{name}"\n' for n in range(count))
        (folder.parent / "cameras.toml").write_text(sources)
        run = bare_frame_call(model, RUNTIMES[0], 0)
        for _ in range(rounds):
            with server(folder, f"--sources-file={folder.parent / 'cameras.toml'}", "--model-control-mode=explicit",
                        f"--load-model={name}") as where:  # fmt: skip
                while where.answered(name) < 20 * count:
                    time.sleep(0.1)
                frames, cpu, began = where.answered(name), where.cpu_s(), time.perf_counter()
                time.sleep(CAMERA_S)
                frames, cpu, passed = (
                    where.answered(name) - frames, where.cpu_s() - cpu, time.perf_counter() - began
                )  # fmt: skip
            found.append((cpu * 1000 / frames, 0.0, frames / passed / count, cpu_of_rtsp_loop(url, run, count)))
    return found


def cpu_of_rtsp_loop(url: str, run: Callable[[Frame], object], count: int) -> float:
    """Return CPU milliseconds for a frame of `count` cameras, each read by a thread; one at a time runs the model."""
    lock, warm = threading.Lock(), threading.Barrier(count + 1, timeout=30)
    counts = [0] * count

    def watch(number: int) -> None:
        camera = open_rtsp(url)
        for seq in range(20 + int(CAMERA_S * FPS)):
            if seq == 20:
                warm.wait()
            picture = camera.read()
            assert picture is not None
            frame = encode_frame(picture, "", FrameHeader(seq=seq))
            with lock:
                run(frame)
            counts[number] += 1
        camera.close()

    threads = [threading.Thread(target=watch, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    warm.wait()
    cpu, before = time.process_time(), sum(counts)
    for thread in threads:
        thread.join()
    return (time.process_time() - cpu) * 1000 / (sum(counts) - before)


@contextlib.contextmanager
def rtsp_cameras(folder: Path) -> Iterator[str]:
    """Run GStreamer's RTSP server, and yield the URL of its picture, which many can read at once."""
    servers = Path(os.environ["EDGE_TEST_CAMERA_SERVERS"])
    libraries = next(servers.glob("usr/lib/*/girepository-1.0")).parent
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(libraries),
        "GI_TYPELIB_PATH": str(libraries / "girepository-1.0"),
        "GST_PLUGIN_SYSTEM_PATH_1_0": str(libraries / "gstreamer-1.0"),
        "GST_PLUGIN_SCANNER": str(libraries / "gstreamer1.0/gstreamer-1.0/gst-plugin-scanner"),
        "GST_REGISTRY_1_0": str(folder.parent / "registry.bin"),
        "PYTHONPATH": str(servers / "usr/lib/python3/dist-packages"),
    }
    program = ROOT / "tests/plugins/cameras/sources/rtsp_camera.py"
    (port,) = free_ports(1)
    command = ["/usr/bin/python3", str(program), f"--size={WIDTH}x{HEIGHT}", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    with ended(process):
        assert process.stdout is not None
        if process.stdout.readline() != "listening\n":
            raise SystemExit("the RTSP server does not start")
        yield f"rtsp://127.0.0.1:{port}/cam"


def paced(source: Pictures, wire: str, seconds: float) -> Iterator[Frame]:
    return (source.frame(wire, seq) for seq in at_rate(FPS, int(seconds * FPS)))


def at_rate(per_s: float, count: int) -> Iterator[int]:
    """Yield 0 to `count` - 1, at that rate."""
    began = time.perf_counter()
    for seq in range(count):
        time.sleep(max(began + seq / per_s - time.perf_counter(), 0))
        yield seq


def main() -> None:
    if sys.argv[1:] and sys.argv[1].startswith(COUNTS_FLAG):
        run_measured(Path(sys.argv[1].removeprefix(COUNTS_FLAG)), sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default="cpu,rate,stages")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    tables = options.tables.split(",")
    # As the server does: without it big arrays pay for page faults each time.
    keep_big_blocks()
    print(f"edge_server in {Path(edge_server.__file__).parent}")
    with repository() as folder, server(folder, "--allow-client-shm=true") as where, pictures(where) as source:
        if "cpu" in tables:
            cpu_time(where, source, folder, options.rounds)
        if "rate" in tables:
            beside_the_runtime(where, source, options.rounds)
        if "stages" in tables:
            stage_times(folder, options.rounds)


if __name__ == "__main__":
    main()
