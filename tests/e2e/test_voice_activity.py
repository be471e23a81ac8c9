"""Voice activity of many microphones at once: sequences of a real recurrent network, with the same bits as one by one.

The network needs the previous 64 audio samples and a state [2, batch, 128]. Triton's implicit state has the batch
first, so `as_stateful` adds a transposition on either side, and a second state for the 64 samples. The reference
is the published network, run by ONNX Runtime alone, one frame of one microphone after the other.
"""

from __future__ import annotations

import os
import shutil
import threading
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from onnx import TensorProto, helper

from tests.kit.infer_input import infer_input
from tests.kit.triton_stream import TritonStream

PIPELINE = Path(__file__).parent / "pipelines" / "voice_activity"
NETWORK, SPEECH = (os.environ.get(name, "") for name in ("EDGE_TEST_VOICE_DETECTOR", "EDGE_TEST_SPEECH"))

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (NETWORK and SPEECH),
        reason="network and speech are not here: tests/e2e/fetch_pipeline_models.sh fetches them",
    ),
]

FRAME = 512
FRAMES = 40
MICROPHONES = 12


def as_stateful(path: str, *, has_controls: bool) -> onnx.ModelProto:
    """Return the network with AUDIO, CONTEXT and MEMORY in; SPEECH and the next CONTEXT and MEMORY out, batch first.

    `has_controls`: also START, at which the states that come in count as zeros, and READY, without which SPEECH is 0.
    """
    model = onnx.load(path)
    graph = model.graph
    sizes = {
        "AUDIO": [FRAME],
        "CONTEXT": [64],
        "MEMORY": [2, 128],
        **({"START": [1], "READY": [1]} if has_controls else {}),
    }
    constants = {
        "sr": np.array(16_000, np.int64), "zero": np.array(0, np.float32), "last_axis": np.array([1], np.int64),
        "from_64": np.array([-64], np.int64), "to_end": np.array([2**62], np.int64),
        "axis_two": np.array([2], np.int64),
    }  # fmt: skip
    context, memory, speech = "CONTEXT", "MEMORY", "output"
    before, after = [], []
    if has_controls:
        context, memory, speech = "clean_context", "clean_memory", "speech"
        before = [
            helper.make_node("Greater", ["START", "zero"], ["starts"]),
            helper.make_node("Unsqueeze", ["starts", "axis_two"], ["starts_wide"]),
            helper.make_node("Where", ["starts", "zero", "CONTEXT"], [context]),
            helper.make_node("Where", ["starts_wide", "zero", "MEMORY"], [memory]),
        ]
        after = [helper.make_node("Mul", ["output", "READY"], [speech])]
    before += [
        helper.make_node("Concat", [context, "AUDIO"], ["input"], axis=1),
        helper.make_node("Transpose", [memory], ["state"], perm=[1, 0, 2]),
    ]
    after += [
        helper.make_node("Identity", [speech], ["SPEECH"]),
        helper.make_node("Slice", ["AUDIO", "from_64", "to_end", "last_axis"], ["NEXT_CONTEXT"]),
        helper.make_node("Transpose", ["stateN"], ["NEXT_MEMORY"], perm=[1, 0, 2]),
    ]
    nodes = [*before, *graph.node, *after]
    outputs = {"SPEECH": [1], "NEXT_CONTEXT": [64], "NEXT_MEMORY": [2, 128]}
    for field, values in (
        (graph.node, nodes),
        (graph.input, [helper.make_tensor_value_info(k, TensorProto.FLOAT, ["batch", *v]) for k, v in sizes.items()]),
        (
            graph.output,
            [helper.make_tensor_value_info(k, TensorProto.FLOAT, ["batch", *v]) for k, v in outputs.items()],
        ),
    ):
        kept = list(values)
        del field[:]
        field.extend(kept)
    graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in constants.items())
    onnx.checker.check_model(model)
    return model


@pytest.fixture(scope="module")
def microphones() -> list[np.ndarray]:
    """Speech as each microphone hears it, [frames, 512], from another moment on and of another loudness and length."""
    with wave.open(SPEECH) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16_000, 1, 2)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
    heard = []
    for number in range(MICROPHONES):
        frames = FRAMES - number
        start = 7_001 * number
        gain = np.float32(0.5 + 0.05 * number)
        heard.append(samples[start : start + frames * FRAME].reshape(frames, FRAME) * gain)
    return heard


@pytest.fixture(scope="module")
def expected(microphones: list[np.ndarray]) -> list[np.ndarray]:
    """The network's answers [frames] to each microphone alone."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(NETWORK, options, providers=["CPUExecutionProvider"])
    found = []
    for frames in microphones:
        context, memory, answers = np.zeros((1, 64), np.float32), np.zeros((2, 1, 128), np.float32), []
        for frame in frames:
            given = {"input": np.concatenate([context, frame[None]], axis=1), "state": memory, "sr": np.array(16_000)}
            speech, memory = session.run(["output", "stateN"], given)
            answers.append(speech[0, 0])
            context = frame[None, -64:]
        found.append(np.array(answers))
    together = np.concatenate(found)
    assert (together > 0.5).any()
    assert (together < 0.1).any()
    return found


@pytest.fixture(scope="module")
def server(module_repository: Any, shared_server: Callable[..., Any]) -> Iterator[Any]:
    path = module_repository.path
    shutil.copytree(PIPELINE, path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name, has_controls in (("voice_direct", True), ("voice_oldest", False)):
        (path / name / "1").mkdir()
        onnx.save(as_stateful(NETWORK, has_controls=has_controls), path / name / "1" / "model.onnx")
    with shared_server(path) as running:
        yield running


def frame_input(library: Any, frame: np.ndarray) -> list[Any]:
    given = infer_input(library, "AUDIO", frame[None])
    return [given]


def over_http(server: Any, model: str, heard: dict[Any, np.ndarray]) -> dict[Any, np.ndarray]:
    """Send the frames of one microphone after the other's, each when the one before is answered."""
    answers: dict[Any, list[float]] = {name: [] for name in heard}
    with triton_http.InferenceServerClient(server.http, network_timeout=100.0) as client:
        for name, frames in heard.items():
            for number, frame in enumerate(frames):
                answer = client.infer(
                    model, frame_input(triton_http, frame), sequence_id=name, sequence_start=number == 0,
                    sequence_end=number == len(frames) - 1,
                )  # fmt: skip
                answers[name].append(answer.as_numpy("SPEECH")[0, 0])
    return {name: np.array(values) for name, values in answers.items()}


def over_one_stream(server: Any, model: str, heard: dict[Any, np.ndarray]) -> dict[Any, np.ndarray]:
    """Send all frames of all microphones in turns on one gRPC stream, without waiting for an answer."""
    answers: dict[Any, dict[int, float]] = {name: {} for name in heard}
    names = {str(name): name for name in heard}
    with TritonStream(server.grpc) as stream:
        for number in range(max(len(frames) for frames in heard.values())):
            for name, frames in heard.items():
                if number < len(frames):
                    stream.send(
                        model, frame_input(triton_grpc, frames[number]), request_id=f"{name}/{number}",
                        sequence_id=name, sequence_start=number == 0, sequence_end=number == len(frames) - 1,
                    )  # fmt: skip
        for _ in range(sum(len(frames) for frames in heard.values())):
            result = stream.result()
            name, number = result.get_response().id.split("/")
            answers[names[name]][int(number)] = result.as_numpy("SPEECH")[0, 0]
    return {name: np.array([values[number] for number in range(len(values))]) for name, values in answers.items()}


def all_at_once(server: Any, model: str, microphones: list[np.ndarray], ids: list[Any]) -> dict[Any, np.ndarray]:
    """Serve the first four microphones on one stream, four on streams of their own, four over HTTP."""
    named = dict(zip(ids, microphones, strict=True))
    jobs = [(over_one_stream, ids[:4]), *((over_one_stream, [name]) for name in ids[4:8])]
    jobs += [(over_http, [name]) for name in ids[8:]]
    found: dict[Any, np.ndarray] = {}
    failures: list[BaseException] = []

    def work(job: Callable[..., dict[Any, np.ndarray]], names: list[Any]) -> None:
        try:
            found.update(job(server, model, {name: named[name] for name in names}))
        except BaseException as failure:
            failures.append(failure)
            raise

    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(110)
    assert failures == []
    return found


@pytest.mark.parametrize("model", ["voice_direct", "voice_oldest"])
def test_concurrent_microphones_get_the_same_bits_as_each_alone(
    server: Any, microphones: list[np.ndarray], expected: list[np.ndarray], model: str
) -> None:
    ids = [number if number % 2 else f"microphone {number}" for number in range(1, MICROPHONES + 1)]
    before = server.statistics(model)
    found = all_at_once(server, model, microphones, ids)
    for name, answers in zip(ids, expected, strict=True):
        np.testing.assert_array_equal(found[name], answers, err_msg=f"microphone {name}")
    after = server.statistics(model)
    frames = sum(len(answers) for answers in expected)
    assert after["inference_count"] - before["inference_count"] == frames
    assert after["execution_count"] - before["execution_count"] < frames, "some frames shared a batch"
