"""Texts as a stream of words for curl: of a model, of one in a process of its own, and at the end of an ensemble."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.kit.model_folder import parameters
from tests.kit.models import identity_config

pytestmark = pytest.mark.skipif(
    shutil.which("curl") is None, reason="curl is not installed: apt-get install curl"
)  # fmt: skip

TENSORS = """
model_transaction_policy { decoupled: true }
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "WORD" data_type: TYPE_STRING dims: [ 1 ] }
"""
# With the parameter "again" the words of the text, for ever.
WORDS = """
import itertools
import json
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily("word_streams", "Texts being split", pb_utils.MetricFamily.GAUGE)
        self.running = family.Metric({"model": args["model_name"]})

    def execute(self, requests):
        for request in requests:
            words = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0].split()
            source = itertools.cycle(words) if "again" in json.loads(request.parameters()) else words
            threading.Thread(target=self.split, args=(request.get_response_sender(), source)).start()

    def split(self, sender, words):
        self.running.increment(1)
        for word in words:
            if sender.is_cancelled():
                break
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("WORD", np.array([word], object))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        self.running.increment(-1)
"""
ENSEMBLE = """
platform: "ensemble"
ensemble_scheduling { step [
  { model_name: "same" input_map { key: "INPUT0" value: "TEXT" } output_map { key: "OUTPUT0" value: "same" } },
  { model_name: "words" input_map { key: "TEXT" value: "same" } output_map { key: "WORD" value: "WORD" } }
] }
"""
TEXT = "Turn  left,\nthen drive 12.5 m; déjà vu: 東京!"


@pytest.fixture(scope="module")
def server(module_repository: Any, shared_server: Callable[..., Any]) -> Iterator[Any]:
    for name, more in (("words", ""), ("isolated_words", parameters(isolation="process"))):
        module_repository.add(name, f'backend: "python" {TENSORS} {more}', files={"1/model.py": WORDS})
    module_repository.add("same", identity_config("BYTES", "1", batch=0))
    module_repository.add("ensemble", TENSORS + ENSEMBLE)
    with shared_server(module_repository.path) as running:
        yield running


@pytest.fixture(params=["words", "isolated_words", "ensemble"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def curl(server: Any, model: str, body: object) -> list[str]:
    return ["curl", "-sSN", "-d", json.dumps(body), server.url(f"/v2/models/{model}/generate_stream")]


def test_curl_gets_each_word_as_an_event(server: Any, model: str) -> None:
    command = curl(server, model, {"TEXT": TEXT, "id": "c"})
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    events = [json.loads(part.removeprefix("data: ")) for part in done.stdout.split("\n\n") if part]
    assert [event["WORD"] for event in events] == TEXT.split()
    assert {(event["model_name"], event["id"]) for event in events} == {(model, "c")}


def test_ending_curl_stops_the_producer(server: Any, model: str) -> None:
    producer = model.replace("ensemble", "words")

    def running() -> list[str]:
        return re.findall(rf'^word_streams{{model="{producer}"}} (\S+)$', server.read_metrics(), re.MULTILINE)

    command = curl(server, model, {"TEXT": "over and over", "parameters": {"again": True}})
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith(b"data: {")
            assert eventually(lambda: running() == ["1.0"])
        finally:
            process.kill()
    assert eventually(lambda: running() == ["0.0"])
