"""Cost and gain of composing models: `python tests/bench/composition.py [ROUNDS]`, with the test extra installed.

1. A Python model in the server's process, and in a process of its own, beside the function that it calls: microseconds
   a call more, at the serving core without a wire; two switches of thread are part of it, for a Python model always
   runs on its instance's own.
2. An ensemble in one call over gRPC, beside the same steps called by a client: a tiny one (two Python steps on a short
   text) and a camera's (decode and fit, classify, label; a JPEG in).
3. Text read from a picture by the server (a Python model that calls two networks), beside the same code in a plain loop
   with the bare runtime, the networks on one thread in both. Needs what `tests/e2e/fetch_pipeline_models.sh` fetches.

All in turns, round after round; printed are medians, and the median of each round's ratio. Quote the ratios: absolute
times belong to the machine, whose cores the client and the server share.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import queue
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnxruntime
import tritonclient.grpc as triton_grpc
from PIL import Image, ImageDraw, ImageFont

from edge_server.config import LogConfig, RepositoryConfig, ServerConfig
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.process.composition_root import build, first_desired_state
from edge_server.telemetry.log import LogSettings

ROOT = Path(__file__).parents[2]
PIPELINES = ROOT / "tests/e2e/pipelines"
CLASSIFIER = ROOT / "model_repository/efficientnet_lite0"
COMMAND = Path(sys.executable).parent / "edge-server"
NETWORKS = {"text_detector": "EDGE_TEST_TEXT_DETECTOR", "text_recogniser": "EDGE_TEST_TEXT_RECOGNISER"}
TURN_S = 0.5
LINES = (
    "Emergency stop 4711",
    "Battery 87 percent",
    "Speed limit 30 km/h",
    "Do not enter",
    "Maximum load 250 kg",
    "Exit",
)

WORK = """
import numpy as np


def halve(values):
    return values * np.float32(0.5)
"""

MODEL = """
import triton_python_backend_utils as pb_utils
from work import halve


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", halve(values))]))
        return responses
"""

CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""

Call = Callable[[], object]


# -- measuring


def seconds_a_call(call: Call) -> float:
    """Return the median of one turn: a call that other processes interrupted does not count for more than another."""
    took, end = [], time.perf_counter() + TURN_S
    while (began := time.perf_counter()) < end:
        call()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def in_turns(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Return the seconds a call of each, one value a round. Each goes first as often as any other."""
    names = list(calls)
    found: dict[str, list[float]] = {name: [] for name in names}
    for call in calls.values():
        seconds_a_call(call)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(seconds_a_call(calls[name]))
    return found


def tell(title: str, calls: dict[str, Call], rounds: int) -> None:
    """Print each way's time, and its ratio to and difference from the last one's."""
    found = in_turns(calls, rounds)
    base = list(found)[-1]
    for name, values in found.items():
        line = f"{title}, {name}: {statistics.median(values) * 1e6:.1f} us"
        if name != base:
            pairs = list(zip(values, found[base], strict=True))
            ratio = statistics.median(one / other for one, other in pairs)
            more_us = statistics.median(one - other for one, other in pairs) * 1e6
            line += f", {ratio:.2f} of {base}, {more_us:+.1f} us"
        print(line)


# -- 1. a Python model beside its function


@contextlib.contextmanager
def serving_core(repository: Path) -> Iterator[Any]:
    config = ServerConfig(
        repository=RepositoryConfig(paths=(str(repository),), control_mode="explicit", load_models=("*",)),
    )
    made = build(config, LogSettings(LogConfig(shows_info=False, shows_warning=False)))
    made.service.set_desired_state(first_desired_state(config.repository, made.source))
    made.service.table.wait_settled(timeout_s=60)
    try:
        yield made
    finally:
        made.close(10.0)


def asked(service: Any, model: str, values: np.ndarray) -> Call:
    """Return one request to the serving core, waited for as a front end's thread waits."""
    tensor = Tensor("IN", DType.FP32, values)
    answers: queue.SimpleQueue[Response] = queue.SimpleQueue()

    def call() -> None:
        service.submit(Request(model, {"IN": tensor}), answers.put, hold_us=math.inf)
        error = answers.get().error
        if error is not None:
            raise SystemExit(f"'{model}' failed: {error}")

    return call


def beside_the_function(folder: Path, rounds: int) -> None:
    for name, more in (
        ("in the process", ""),
        ("in its own process", 'parameters { key: "isolation" value { string_value: "process" } }\n'),
    ):
        version = folder / name.replace(" ", "_") / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(CONFIG + more)
        (version / "model.py").write_text(MODEL)
        (version / "work.py").write_text(WORK)
    halve = module(folder / "in_the_process/1/work.py").halve
    with serving_core(folder) as core:
        for title, size in (("16 floats", 16), ("150,528 floats", 3 * 224 * 224)):
            values = np.random.default_rng(0).random(size, np.float32)
            calls = {
                way: asked(core.service, way.replace(" ", "_"), values)
                for way in ("in the process", "in its own process")
            }
            tell(f"Python model, {title}", {**calls, "the bare function": lambda values=values: halve(values)}, rounds)


def module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made
    spec.loader.exec_module(made)
    return made


# -- 2. and 3. the installed server


@contextlib.contextmanager
def server(repository: Path) -> Iterator[triton_grpc.InferenceServerClient]:
    """Yield a client of a server of its own."""
    flags = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    flags += ["--allow-external-links", "--log-info=false", "--governor=false"]
    process = subprocess.Popen(
        [str(COMMAND), "serve", f"--model-repository={repository}", *flags], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = re.search(r"gRPC ([^;\s]+)", process.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        with triton_grpc.InferenceServerClient(found[1]) as client:
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()


def ask(client: triton_grpc.InferenceServerClient, model: str, name: str, array: np.ndarray) -> Any:
    given = triton_grpc.InferInput(name, list(array.shape), "BYTES" if array.dtype == np.object_ else "FP32")
    given.set_data_from_numpy(array)
    return client.infer(model, [given])


def beside_a_client(folder: Path, rounds: int) -> None:
    for source in (PIPELINES / "words", PIPELINES / "camera"):
        shutil.copytree(source, folder, dirs_exist_ok=True)
    for name in ("tidy_twice", "tidy_tokens", "name_subject"):
        (folder / name / "1").mkdir()
    (folder / CLASSIFIER.name).symlink_to(CLASSIFIER)
    shutil.copy(CLASSIFIER / "labels.txt", folder / "name_best")
    text = np.array([b"  much   room \n here "], dtype=np.object_)
    picture = np.array([[(ROOT / "tests/data/coffee.jpg").read_bytes()]], dtype=np.object_)
    with server(folder) as client:

        def tidy_by_steps() -> Any:
            once = ask(client, "tidy", "TEXT", text).as_numpy("TIDY")
            return ask(client, "tidy", "TEXT", once).as_numpy("TIDY")

        def camera_by_steps() -> Any:
            fitted = ask(client, "decode_and_fit", "FILE", picture).as_numpy("FITTED")
            scores = ask(client, CLASSIFIER.name, "input", fitted).as_numpy("probabilities")
            return ask(client, "name_best", "PROBABILITIES", scores).as_numpy("NAME")

        def tidy() -> Any:
            return ask(client, "tidy_twice", "TEXT", text).as_numpy("TIDY")

        def camera() -> Any:
            return ask(client, "name_subject", "PICTURE", picture).as_numpy("SUBJECT")

        for whole, steps in ((tidy, tidy_by_steps), (camera, camera_by_steps)):
            assert np.array_equal(whole(), steps()), "both ways answer the same"
        tell("two tiny steps", {"ensemble": tidy, "steps by a client": tidy_by_steps}, rounds)
        tell("camera", {"ensemble": camera, "steps by a client": camera_by_steps}, rounds)


def page(lines: tuple[str, ...]) -> bytes:
    picture = Image.new("RGB", (640, 64 * len(lines) + 60), (250, 248, 240))
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(size=32)
    for number, line in enumerate(lines):
        pen.text((40, 30 + number * 64), line, font=font, fill=(20, 20, 30))
    return bytes(cv2.imencode(".png", np.asarray(picture)[:, :, ::-1])[1])


def bare_reader() -> Callable[[bytes], list[str]]:
    """Return the pipeline without a server: the same code, the networks called in place, one group after the other."""
    reading = module(PIPELINES / "text_in_images/read_text/1/text_reading.py")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    detector, recogniser = (
        onnxruntime.InferenceSession(os.environ[variable], options, providers=["CPUExecutionProvider"])
        for variable in NETWORKS.values()
    )
    alphabet = reading.read_alphabet(recogniser.get_modelmeta().custom_metadata_map["character"])

    def read(encoded: bytes) -> list[str]:
        picture = reading.decode(encoded)
        given, scale = reading.to_detector(picture)
        lines = reading.find_lines(detector.run(None, {"x": given})[0][0, 0], scale)
        texts = [""] * len(lines)
        for group in reading.to_recogniser(picture, lines, 8):
            scores = recogniser.run(None, {"x": group.rows})[0]
            for member, text in zip(group.members, reading.spell(scores, alphabet), strict=True):
                texts[member] = text
        return texts

    return read


def text_beside_a_loop(folder: Path, rounds: int) -> None:
    shutil.copytree(PIPELINES / "text_in_images", folder, dirs_exist_ok=True)
    for name, variable in NETWORKS.items():
        (folder / name / "1").mkdir()
        shutil.copy(os.environ[variable], folder / name / "1" / "model.onnx")
        with (folder / name / "config.pbtxt").open("a") as config:
            config.write('parameters { key: "intra_op_thread_count" value { string_value: "1" } }\n')
    read = bare_reader()
    with server(folder) as client:
        for lines in (LINES[:1], LINES):
            encoded = page(lines)
            picture = np.array([encoded], dtype=np.object_)

            def served(picture: np.ndarray = picture) -> list[str]:
                return [text.decode() for text in ask(client, "read_text", "IMAGE", picture).as_numpy("TEXT")]

            assert served() == read(encoded) == list(lines)
            calls = {"server": served, "plain loop": lambda encoded=encoded: read(encoded)}
            tell(f"text in images, {len(lines)} lines", calls, rounds)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    for measure in (beside_the_function, beside_a_client, text_beside_a_loop):
        if measure is text_beside_a_loop and not all(os.environ.get(name) for name in NETWORKS.values()):
            print("text in images: not measured, the networks are not here (tests/e2e/fetch_pipeline_models.sh)")
            continue
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), rounds)


if __name__ == "__main__":
    main()
