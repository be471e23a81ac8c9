"""Measurements of the frame stream: `python tests/bench/frame_stream.py [ROUNDS]`, installed with the test extra.

1. Frames a second through the stream beside the bare runtime with the same preprocessing called in a loop, and the
   latency that the stream adds to one frame alone: raw bgr8, JPEG, and shared memory, 640x480.
2. CPU seconds of server and client for a camera of 30 frames a second.
3. Four cameras of 30 frames a second at a model that can do 40: what each gets, how old, and what is dropped.

Everything is measured in turns, round after round, and medians are printed. Quote the ratios: absolute numbers depend
on the machine. Client and server share its cores, so the client's own cost is part of the stream's time.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import shared_memory
from pathlib import Path

import cv2
import numpy as np
from harness import ROOT, Server, server

from edge_server.client import Delivery, Frame, FrameHeader, FrameStream, RegionSlice
from edge_server.core.model_spec import InputSpec, ModelSpec
from edge_server.core.tensor import DType
from edge_server.plugins.vision.image_plan import ImagePlan, make_image_plan
from edge_server.repository import pbtxt

BUNDLED = ROOT / "model_repository"
MODELS = ("efficientnet_lite0", "face_detection_yunet")
RUNTIMES = ("openvino", "onnxruntime")
THREADS = (0, 1)
"""Threads of the runtime: 0 is one for each core. With one, on two cores, a core is free for receiving and decoding;
with all, the stream's own computing slows the inference."""
SETTINGS = {"openvino": "INFERENCE_NUM_THREADS", "onnxruntime": "intra_op_thread_count"}
WIRES = ("raw", "jpeg", "shm")
WIDTH, HEIGHT = 640, 480
TURN_S = 1.0
CAMERA_S = 5.0
FPS = 30.0
UNDER_WAY = 2
"""Frames on their way at once where throughput is measured: one that runs, one that is made ready meanwhile."""

LIMITED = """
name: "limited"
backend: "identity"
max_batch_size: 0
input { name: "INPUT0" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 224, 224 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }
parameters { key: "image_fit" value { string_value: "stretch" } }
parameters { key: "image_color" value { string_value: "bgr" } }
parameters { key: "execute_delay_ms" value { string_value: "25" } }
"""
"""A model of 25 ms, so of 40 frames a second, whatever the machine is busy with."""


# -- the models


@contextlib.contextmanager
def repository() -> Iterator[Path]:
    """Every model once for each runtime and number of threads, with one instance as the bare loop has, and the limited
    one."""
    with tempfile.TemporaryDirectory() as folder:
        for model, runtime, threads in itertools.product(MODELS, RUNTIMES, THREADS):
            target = Path(folder) / served_as(model, runtime, threads)
            (target / "1").mkdir(parents=True)
            shutil.copy(BUNDLED / model / "1/model.onnx", target / "1")
            shutil.copy(BUNDLED / model / "labels.txt", target)
            config = (BUNDLED / model / "config.pbtxt").read_text().replace(f'"{model}"', f'"{target.name}"', 1)
            config += f'\nbackend: "{runtime}"\ninstance_group {{ count: 1 kind: KIND_CPU }}\n'
            if threads:
                config += f'parameters {{ key: "{SETTINGS[runtime]}" value {{ string_value: "{threads}" }} }}\n'
            (target / "config.pbtxt").write_text(config)
        limited = Path(folder) / "limited"
        (limited / "1").mkdir(parents=True)
        (limited / "config.pbtxt").write_text(LIMITED)
        yield Path(folder)


def served_as(model: str, runtime: str, threads: int) -> str:
    return f"{model}_on_{threads or 'all'}_of_{runtime}"


# -- pictures on their way


@dataclass
class Pictures:
    """The same image in each encoding. `region` has a slot for each frame in flight, written before the frame is
    sent, as a camera's driver would."""

    pixels: np.ndarray
    jpeg: bytes
    region: shared_memory.SharedMemory
    name: str
    places: int = 4
    _next: int = field(default=0)

    def frame(self, wire: str, seq: int) -> Frame:
        header = FrameHeader(seq=seq)
        if wire == "jpeg":
            return Frame(header, format="jpeg", data=self.jpeg)
        frame = Frame(header, HEIGHT, WIDTH, "bgr8", WIDTH * 3)
        if wire == "raw":
            frame.data = self.pixels.reshape(-1).data
            return frame
        offset = seq % self.places * self.pixels.nbytes
        np.ndarray(self.pixels.shape, np.uint8, self.region.buf, offset)[:] = self.pixels
        frame.region = RegionSlice(self.name, offset, self.pixels.nbytes)
        return frame


@contextlib.contextmanager
def pictures(where: Server) -> Iterator[Pictures]:
    photo = cv2.imread(str(ROOT / "tests/data/coffee.jpg"))
    pixels = np.ascontiguousarray(cv2.resize(photo, (WIDTH, HEIGHT)))
    jpeg = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes()
    region = shared_memory.SharedMemory(create=True, size=4 * pixels.nbytes)
    try:
        path = "/v2/systemsharedmemory/region/bench"
        where.post(f"{path}/register", {"key": f"/{region.name.lstrip('/')}", "offset": 0, "byte_size": region.size})
        yield Pictures(pixels, jpeg, region, "bench")
        where.post(f"{path}/unregister", {})
    finally:
        region.close()
        region.unlink()


# -- the bare runtime


def plan_of(model: str) -> ImagePlan:
    config = pbtxt.parse_text((BUNDLED / model / "config.pbtxt").read_bytes(), model)
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
    if runtime == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.intra_op.spin_duration_us", "30")
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
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
    plan = plan_of(model)
    row = np.zeros(plan.item_shape, np.float32)
    infer = runtime_call(model, runtime, threads, plan.input_name, row[None])
    frame = source.frame("jpeg" if wire == "jpeg" else "raw", 0)
    data = memoryview(frame.data)

    def call() -> None:
        plan.write(plan.read_frame(frame, data, model=model), row, model=model)
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


def stream_rate(where: Server, model: str, wire: str, source: Pictures) -> float:
    """Return results a second over one turn, UNDER_WAY frames on their way at once."""
    sent = threading.Semaphore(UNDER_WAY)
    is_over = threading.Event()

    def frames() -> Iterator[Frame]:
        seq = 0
        while True:
            sent.acquire()
            if is_over.is_set():
                return
            seq += 1
            yield source.frame(wire, seq)

    with FrameStream(where.grpc, model, delivery=Delivery(depth=UNDER_WAY), keeps_all=True) as stream:
        count, began = 0, 0.0
        for result in stream.results(frames()):
            check(result.error)
            # The first frames find nothing warm.
            if result.header.seq == 5:
                began = time.perf_counter()
            elif result.header.seq > 5:
                count += 1
            now = time.perf_counter()
            if began and now >= began + TURN_S:
                is_over.set()
                rate = count / (now - began)
                sent.release(UNDER_WAY)
                break
            sent.release()
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


def share(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(int(part * len(values)), len(values) - 1)] if values else float("nan")


# -- the three tables


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
    show(heads, rows)


def _beside(
    where: Server, source: Pictures, rounds: int, model: str, runtime: str, threads: int, wire: str
) -> list[str]:
    name = served_as(model, runtime, threads)
    call = bare_call(model, runtime, threads, wire, source)
    bare, through, ratios, p50, added50, added99 = [], [], [], [], [], []
    for _ in range(rounds):
        rate, took, _ = bare_rate(call)
        bare.append(rate)
        through.append(stream_rate(where, name, wire, source))
        ratios.append(through[-1] / rate)
        latencies = stream_latencies(where, name, wire, source)
        p50.append(share(took, 0.5))
        added50.append(share(latencies, 0.5) - share(took, 0.5))
        added99.append(share(latencies, 0.99) - share(took, 0.99))
    medians = [statistics.median(values) for values in (bare, through)]
    times = [statistics.median(values) * 1000 for values in (p50, added50, added99)]
    return [*(f"{value:.1f}" for value in medians), f"{statistics.median(ratios):.2f}", *(f"{ms:.2f}" for ms in times)]


def cpu_of_a_camera(where: Server, source: Pictures, rounds: int) -> None:
    model, runtime = MODELS[0], RUNTIMES[0]
    print(f"\nCPU seconds a second for one camera of {FPS:g} fps, {WIDTH}x{HEIGHT}, {model} on {runtime}")
    rows = []
    for wire in WIRES:
        bare = bare_call(model, runtime, 0, wire, source)
        found = [
            (_camera(where, served_as(model, runtime, 0), wire, source), bare_rate(bare)[2] * FPS)
            for _ in range(rounds)
        ]
        columns = zip(*((*camera, alone) for camera, alone in found), strict=True)
        rows.append((wire, *(f"{statistics.median(column):.2f}" for column in columns)))
    show(("wire", "fps out", "server", "client", "bare loop"), rows)


def _camera(where: Server, model: str, wire: str, source: Pictures) -> tuple[float, float, float]:
    """Return results a second, and CPU seconds a second of server and client."""
    began, cpu_there, cpu_here = time.perf_counter(), where.cpu_s(), time.process_time()
    with FrameStream(where.grpc, model) as stream:
        answered = sum(1 for _ in stream.results(paced(source, wire, CAMERA_S)))
    passed = time.perf_counter() - began
    return answered / passed, (where.cpu_s() - cpu_there) / passed, (time.process_time() - cpu_here) / passed


def paced(source: Pictures, wire: str, seconds: float) -> Iterator[Frame]:
    began = time.perf_counter()
    for seq in range(int(seconds * FPS)):
        time.sleep(max(began + seq / FPS - time.perf_counter(), 0))
        yield source.frame(wire, seq)


def four_cameras(where: Server, source: Pictures, wire: str = "raw") -> None:
    print(f"\nfour cameras of {FPS:g} fps, {WIDTH}x{HEIGHT} {wire}, at a model of 40 fps, for {2 * CAMERA_S:g} s")
    rows: list[tuple[str, ...]] = [() for _ in range(4)]

    def watch(number: int) -> None:
        sent: dict[int, float] = {}

        def frames() -> Iterator[Frame]:
            for frame in paced(source, wire, 2 * CAMERA_S):
                sent[frame.header.seq] = time.perf_counter()
                yield frame

        ages, began = [], time.perf_counter()
        with FrameStream(where.grpc, "limited", delivery=Delivery(notifies_drops=True)) as stream:
            for result in stream.results(frames()):
                check(result.error)
                ages.append(time.perf_counter() - sent[result.header.seq])
            passed, counts = time.perf_counter() - began, stream.counters()
        there = ", ".join(f"{reason.name.lower()} {count}" for reason, count in counts.dropped.items())
        times = [f"{share(ages, part) * 1000:.0f}" for part in (0.5, 0.99, 1.0)]
        balance = counts.offered - counts.answered - counts.dropped_here - sum(counts.dropped.values())
        rows[number] = (
            f"camera {number}", f"{len(ages) / passed:.1f}", *times, str(counts.offered), str(counts.answered),
            there, str(counts.dropped_here), str(balance),
        )  # fmt: skip

    threads = [threading.Thread(target=watch, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    show(("", "fps", "age p50 ms", "p99", "max", "offered", "answered", "dropped there", "never sent", "missing"), rows)


def show(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[at]) for row in (heads, *rows)) for at in range(len(heads))]
    for row in (heads, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with repository() as folder, server(folder, "--allow-client-shm=true") as where, pictures(where) as source:
        beside_the_runtime(where, source, rounds)
        cpu_of_a_camera(where, source, rounds)
        four_cameras(where, source)


if __name__ == "__main__":
    main()
