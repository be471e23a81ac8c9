"""Speed of `edge-server ros replay` beside loops over the same runtime in one process, in turns, round after round:
`python tests/bench/ros_replay.py [--rounds=N] [--frames=N] [--drives=NAME,...]`.

- bare: images that are in memory are prepared and inferred, one after the other. The results are not looked at.
- script: reads the drive, prepares, infers, decodes the boxes and writes them, one after the other, with the same code
  as replay and server.
- replay: the command, with a server on the same cores. `shared`: the server has --allow-client-shm=true.

Rates need an idle machine. The processor time of a frame, of all processes together, is printed beside those of script
and replay; that of replay includes the start of the command, half a second for all frames.

All compute in f32 with all cores: OpenVINO by itself would compute in bf16 where the processor has it. A quarter of a
minute for a round of a drive. Needs the extras ros and test.
"""

from __future__ import annotations

import argparse
import itertools
import re
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import openvino
from harness import COMMAND, ROOT, Server, server
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

from edge_server.core.model_spec import ModelSpec
from edge_server.memory.malloc_settings import keep_big_blocks
from edge_server.plugins.ros.messages.message_conversion import detections_message
from edge_server.plugins.ros.messages.ros2_types import MessageTypes
from edge_server.plugins.ros.recordings.recording import ImageRecording
from edge_server.plugins.ros.recordings.recording_writer import RecordingWriter
from edge_server.plugins.vision.image_plan import make_image_plan
from edge_server.plugins.vision.perception_decoder import Perception, make_perception_decoder
from edge_server.protocol.frame_messages import Frame, FrameResult
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions, resolve

MODEL = "face_detection_yunet"
DRIVES = {
    "640x480 raw": (640, 480, ""), "640x480 JPEG": (640, 480, "jpeg"),
    "1920x1080 raw": (1920, 1080, ""), "1920x1080 JPEG": (1920, 1080, "jpeg"),
}  # fmt: skip
TURN_S = 1.0
TOPIC = "/front/image_raw"


def write_drive(path: Path, width: int, height: int, format: str, count: int) -> None:
    """Write a recording of one photograph, as ROS 2 writes it."""
    store = get_typestore(Stores.ROS2_HUMBLE)
    types: Any = store.types
    photo = cv2.resize(cv2.imread(str(ROOT / "tests/data/coffee.jpg")), (width, height))
    kind = "sensor_msgs/msg/CompressedImage" if format else "sensor_msgs/msg/Image"
    with Writer(path, version=8, storage_plugin=StoragePlugin.MCAP) as writer:
        connection = writer.add_connection(TOPIC, kind, typestore=store)
        for number in range(count):
            stamp = types["builtin_interfaces/msg/Time"](sec=number, nanosec=0)
            header = types["std_msgs/msg/Header"](stamp=stamp, frame_id="camera")
            if format:
                message = types[kind](header=header, format=format, data=cv2.imencode(".jpg", photo)[1].ravel())
            else:
                message = types[kind](header=header, height=height, width=width, encoding="bgr8", is_bigendian=0,
                                      step=3 * width, data=photo.ravel())  # fmt: skip
            writer.write(connection, number * 33_000_000, store.serialize_cdr(message, kind))


def specification() -> ModelSpec:
    model = Scanner([ROOT / "model_repository"]).find(MODEL)
    assert model is not None
    return resolve(model, 1, ResolveOptions()).spec


def make_run() -> Callable[[Frame, bool], Perception | None]:
    """Return a function that prepares and infers one frame, and decodes its boxes if asked to."""
    spec = specification()
    plan, decoder = make_image_plan(spec), make_perception_decoder(spec)
    assert plan is not None
    assert decoder is not None
    item = np.zeros(plan.item_shape, np.float32)
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    file = ROOT / "model_repository" / MODEL / "1/model.onnx"
    request = openvino.Core().compile_model(file, "CPU", settings).create_infer_request()
    request.set_tensor(plan.input_name, openvino.Tensor(item.reshape(plan.shape), shared_memory=True))

    def run(frame: Frame, decodes: bool) -> Perception | None:
        fit = plan.write(plan.read_frame(frame, memoryview(frame.data), model=MODEL), item, model=MODEL)
        outputs = request.infer(share_outputs=True)
        if not decodes:
            return None
        arrays = {output.name: request.get_tensor(output.name).data for output in spec.outputs}
        assert len(outputs) == len(arrays)
        return decoder.decode(arrays, None, fit, decoder.what, model=MODEL)

    return run


def frames_of(drive: Path) -> Iterator[Frame]:
    with ImageRecording(drive, MessageTypes()) as recording:
        for recorded in recording.frames([TOPIC]):
            assert recorded.frame is not None
            yield recorded.frame


def bare_rate(run: Callable[[Frame, bool], object], drive: Path) -> float:
    frames = list(itertools.islice(frames_of(drive), 20))
    for frame in frames[:5]:
        run(frame, False)
    began, count = time.perf_counter(), 0
    while time.perf_counter() < began + TURN_S:
        run(frames[count % len(frames)], False)
        count += 1
    return count / (time.perf_counter() - began)


def script_rate(run: Callable[[Frame, bool], Perception | None], drive: Path, output: Path) -> float:
    began, count = time.perf_counter(), 0
    with RecordingWriter(output, MessageTypes()) as writer:
        for frame in frames_of(drive):
            seen = run(frame, True)
            assert seen is not None
            result = FrameResult(frame.header, detections=seen.detections)
            writer.write("/detections", detections_message(result), frame.header.sec * 10**9)
            count += 1
    output.unlink()
    return count / (time.perf_counter() - began)


def replay_rate(where: Server, drive: Path, output: Path) -> float:
    command = [COMMAND, "ros", "replay", drive, f"--model={MODEL}", f"--address={where.grpc}", f"--output={output}"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    output.unlink()
    found = re.search(r"\(([\d.]+)/s\)", text)
    assert found is not None, text
    return float(found[1])


def cpu_s(servers: Iterable[Server]) -> float:
    """Return the processor time so far of this process, of the commands that have ended, and of the servers."""
    commands = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + commands.ru_utime + commands.ru_stime + sum(one.cpu_s() for one in servers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--drives", default=",".join(DRIVES))
    options = parser.parse_args()
    keep_big_blocks()
    run = make_run()
    with tempfile.TemporaryDirectory() as home, server(ROOT / "model_repository") as plain, \
            server(ROOT / "model_repository", "--allow-client-shm=true") as shared:  # fmt: skip
        print("frames a second, medians; in brackets the medians of each round's part of bare; processor ms of a frame",
              flush=True)  # fmt: skip
        for name in options.drives.split(","):
            drive, output = Path(home) / name.replace(" ", "_"), Path(home) / "labels.mcap"
            write_drive(drive, *DRIVES[name], options.frames)
            ways: dict[str, Callable[[], float]] = {
                "bare": partial(bare_rate, run, drive),
                "script": partial(script_rate, run, drive, output),
                "replay": partial(replay_rate, plain, drive, output),
                "shared": partial(replay_rate, shared, drive, output),
            }
            rounds: list[dict[str, float]] = [{} for _ in range(options.rounds)]
            spent_ms: dict[str, list[float]] = {way: [] for way in ways}
            for one, (way, measure) in itertools.product(rounds, ways.items()):
                before_s = cpu_s((plain, shared))
                one[way] = measure()
                spent_ms[way].append((cpu_s((plain, shared)) - before_s) * 1000 / options.frames)
            cells = []
            for way in ways:
                part = statistics.median(one[way] / one["bare"] for one in rounds)
                cell = f"{way} {statistics.median(one[way] for one in rounds):.0f} ({part:.2f})"
                cells.append(cell if way == "bare" else f"{cell} {statistics.median(spent_ms[way]):.1f}")
            print(f"{name:15}", "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
