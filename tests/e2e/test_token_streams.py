"""Texts as a stream of tokens, over gRPC and as server-sent events, alone and at the end of an ensemble."""

from __future__ import annotations

import json
import queue
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from tests.kit.eventually import eventually
from tests.kit.infer_input import infer_input
from tests.kit.model_folder import parameters
from tests.kit.triton_stream import TritonStream, is_final

PIPELINE = Path(__file__).parent / "pipelines" / "words"
ISOLATED = parameters(isolation="process")
TEXT = "Turn left,  then drive 12.5 m\nto gate 7; déjà vu: 東京!"
TOKENS = [
    "Turn", " ", "left", ",", "  ", "then", " ", "drive", " ", "12", ".", "5", " ", "m", "\n", "to", " ", "gate", " ",
    "7", ";", " ", "déjà", " ", "vu", ":", " ", "東京", "!",
]  # fmt: skip

FALTERS = """
backend: "python"
model_transaction_policy { decoupled: true }
input { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "TOKEN" data_type: TYPE_STRING dims: [ 1 ] }
"""
# COUNT tokens, then an error.
FALTERING = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            for _ in range(count):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("TOKEN", np.array([b"a"], dtype=np.object_))]))
            error = pb_utils.TritonError("An Error Occurred", pb_utils.TritonError.UNAVAILABLE)
            sender.send(pb_utils.InferenceResponse(error=error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")


@pytest.fixture(scope="module")
def server(module_repository: Any, shared_server: Callable[..., Any]) -> Iterator[Any]:
    path = module_repository.path
    shutil.copytree(PIPELINE, path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tidy_tokens", "tidy_twice"):
        (path / name / "1").mkdir()
    shutil.copytree(path / "token_stream", path / "isolated_token_stream")
    with (path / "isolated_token_stream" / "config.pbtxt").open("a") as config:
        config.write(ISOLATED)
    module_repository.add("falters", FALTERS)
    (path / "falters" / "1" / "model.py").write_text(FALTERING)
    with shared_server(path) as running:
        yield running


@pytest.fixture(params=["token_stream", "isolated_token_stream"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def at_work(server: Any, model: str) -> float:
    found = re.search(rf'^token_streams{{model="{model}"}} (\S+)$', server.read_metrics(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def text_input(text: bytes) -> list[triton_grpc.InferInput]:
    given = infer_input(triton_grpc, "TEXT", np.array([text], dtype=np.object_))
    return [given]


class Stream(TritonStream):
    def ask(self, model: str, text: str, request_id: str, **more: Any) -> None:
        self.send(model, text_input(text.encode()), request_id=request_id, **more)


@pytest.fixture
def stream(server: Any) -> Iterator[Stream]:
    with Stream(server.grpc) as opened:
        yield opened


def test_each_token_is_a_response_and_the_final_flag_an_empty_one_on_request(stream: Stream, model: str) -> None:
    stream.ask(model, TEXT, "a", enable_empty_final_response=True)
    results = [stream.result() for _ in range(len(TOKENS) + 1)]
    assert [result.as_numpy("TOKEN")[0].decode() for result in results[:-1]] == TOKENS
    places = [int(result.as_numpy("BEGIN")[0]) for result in results[:-1]]
    assert places == [len("".join(TOKENS[:number])) for number in range(len(TOKENS))]
    assert [is_final(result) for result in results] == [False] * len(TOKENS) + [True]
    assert results[-1].as_numpy("TOKEN") is None
    assert {result.get_response().id for result in results} == {"a"}


def test_without_the_option_no_empty_final_response_is_sent(stream: Stream, model: str) -> None:
    stream.ask(model, TEXT, "first")
    stream.ask(model, "", "nothing")
    stream.ask(model, "end", "last")
    results = [stream.result() for _ in range(len(TOKENS) + 1)]
    tokens = {"first": [], "nothing": [], "last": []}
    for result in results:
        tokens[result.get_response().id].append(result.as_numpy("TOKEN")[0].decode())
    assert tokens == {"first": TOKENS, "nothing": [], "last": ["end"]}
    assert stream.responses.empty()


def test_the_tokens_of_many_texts_on_one_stream_keep_their_order(stream: Stream, model: str) -> None:
    texts = {str(number): f"{number} " * (20 + number) for number in range(8)}
    for name, text in texts.items():
        stream.ask(model, text, name, enable_empty_final_response=True)
    found: dict[str, str] = dict.fromkeys(texts, "")
    open_ = set(texts)
    while open_:
        result = stream.result()
        name = result.get_response().id
        assert name in open_, "nothing comes after the final response"
        if is_final(result):
            open_.discard(name)
        else:
            found[name] += result.as_numpy("TOKEN")[0].decode()
    assert found == texts


def test_a_text_that_is_not_utf8_gets_an_error_and_the_stream_continues(stream: Stream, model: str) -> None:
    stream.send(model, text_input(b"\xff\xfe"), request_id="bad")
    _, error = stream.answer()
    assert "TEXT is not UTF-8" in str(error)
    stream.ask(model, "goes on", "good")
    assert [stream.result().as_numpy("TOKEN")[0] for _ in range(3)] == [b"goes", b" ", b"on"]


def curl(server: Any, model: str, door: str, body: object) -> subprocess.CompletedProcess[str]:
    command = ["curl", "-sSN", "-w", "%{stderr}%{http_code}", "-d", json.dumps(body)]
    return subprocess.run(
        [*command, server.url(f"/v2/models/{model}/{door}")], capture_output=True, text=True, timeout=30, check=True
    )


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part]


@pytest.mark.sample
@needs_curl
@pytest.mark.parametrize("text", [TEXT, "", "one"])
def test_curl_gets_each_token_as_an_event(server: Any, model: str, text: str) -> None:
    done = curl(server, model, "generate_stream", {"TEXT": text, "id": "c"})
    assert done.stderr == "200"
    told = events(done.stdout)
    assert "".join(event["TOKEN"] for event in told) == text
    assert len(told) == {TEXT: len(TOKENS), "": 0, "one": 1}[text]
    assert all(event["model_name"] == model and event["id"] == "c" for event in told)


@needs_curl
@pytest.mark.parametrize(("count", "status"), [(0, "503"), (2, "200")])
def test_an_error_is_an_event_and_sets_the_status_if_it_comes_first(server: Any, count: int, status: str) -> None:
    """As Triton's own test of the endpoint has it (qa/L0_http, test_generate_stream_response_error)."""
    done = curl(server, "falters", "generate_stream", {"COUNT": count})
    assert done.stderr == status
    told = events(done.stdout)
    assert [event["TOKEN"] for event in told[:-1]] == ["a"] * count
    assert told[-1] == {"error": "An Error Occurred"}


@needs_curl
def test_an_ensemble_streams_events(server: Any) -> None:
    done = curl(server, "tidy_tokens", "generate_stream", {"TEXT": "  much   room \n here "})
    assert done.stderr == "200"
    assert [event["TOKEN"] for event in events(done.stdout)] == ["much", " ", "room", " ", "here"]
    assert {event["model_name"] for event in events(done.stdout)} == {"tidy_tokens"}


@needs_curl
def test_generate_on_an_ensemble_returns_the_last_steps_outputs(server: Any) -> None:
    done = curl(server, "tidy_twice", "generate", {"TEXT": "  much   room \n here ", "id": "7"})
    assert done.stderr == "200"
    answer = json.loads(done.stdout)
    assert answer == {
        "id": "7", "model_name": "tidy_twice", "model_version": "1", "TIDY": "much room here", "WORDS": 3,
    }  # fmt: skip


@needs_curl
@pytest.mark.parametrize(
    ("model", "body", "status", "message"),
    [
        ("tidy_twice", {}, "400", "TEXT"),
        ("tidy_twice", {"TEXT": ["a", "b"]}, "400", "TEXT"),
        ("tidy_twice", {"TEXT": 5}, "400", "TEXT"),
        ("tidy_tokens", {"TEXT": "two tokens"}, "500", "exactly 1 response"),
    ],
)
def test_generate_on_an_ensemble_reports_invalid_inputs(
    server: Any, model: str, body: object, status: str, message: str
) -> None:
    done = curl(server, model, "generate", body)
    assert done.stderr == status, done.stdout
    assert message in json.loads(done.stdout)["error"]


@needs_curl
@pytest.mark.parametrize("model", ["token_stream", "isolated_token_stream", "tidy_tokens"])
def test_ending_curl_stops_the_producer(server: Any, model: str) -> None:
    producer = model.replace("tidy_tokens", "token_stream")
    body = json.dumps({"TEXT": "over and over ", "parameters": {"over_and_over": True}})
    command = ["curl", "-sSN", "-d", body, server.url(f"/v2/models/{model}/generate_stream")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith(b"data: {")
            assert eventually(lambda: at_work(server, producer) == 1)
        finally:
            process.kill()
    assert eventually(lambda: at_work(server, producer) == 0)


class Paused:
    """A gRPC stream whose reader stops at the first response, until `go_on`."""

    def __init__(self, server: Any) -> None:
        self.has_one = threading.Event()
        self.may_go_on = threading.Event()
        self.got: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client = triton_grpc.InferenceServerClient(server.grpc)
        self.client.start_stream(self._take)

    def _take(self, result: Any, error: Any) -> None:
        self.has_one.set()
        self.may_go_on.wait(100)
        self.got.put((result, error))

    def ask(self, model: str, text: str, **more: Any) -> None:
        self.client.async_stream_infer(model, text_input(text.encode()), **more)
        assert self.has_one.wait(30)

    def close(self) -> None:
        self.may_go_on.set()
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


@pytest.fixture
def paused(server: Any) -> Iterator[Paused]:
    opened = Paused(server)
    yield opened
    opened.close()


def test_a_slow_reader_delays_no_other_and_misses_no_token(
    server: Any, model: str, paused: Paused, stream: Stream
) -> None:
    words = [f"w{chr(97 + number % 26)}" for number in range(2000)]
    paused.ask(model, " ".join(words), enable_empty_final_response=True)
    # The producer ends although its responses are not read, and others are served.
    assert eventually(lambda: at_work(server, model) == 0, 90.0)
    stream.ask(model, "others", "quick")
    assert stream.result().as_numpy("TOKEN")[0] == b"others"
    assert paused.got.empty()
    paused.may_go_on.set()
    found = []
    while True:
        result, error = paused.got.get(timeout=60)
        assert error is None
        if is_final(result):
            break
        found.append(result.as_numpy("TOKEN")[0].decode())
    assert "".join(found) == " ".join(words)


def test_a_slow_reader_that_disconnects_stops_the_producer(server: Any, model: str, paused: Paused) -> None:
    paused.ask(model, "over and over ", parameters={"over_and_over": True})
    assert eventually(lambda: at_work(server, model) == 1)
    paused.close()
    assert eventually(lambda: at_work(server, model) == 0)
