"""Requests of language models whose client has disconnected or whose engine hangs are removed completely."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.kit.model_folder import model_folder
from tests.kit.server import serve

ANSWERS = {"hello": "Hello!", "count": "one two three", "long": "x" * 40}
TIMEOUT_S = 1
STEP_S = 0.05
"""Of `stuck`: its answer to "long" takes twice the limit."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two models with a script: `stuck` in a process of its own, where the question "hang" never ends, and `beside`."""
    models = tmp_path_factory.mktemp("models")
    for name, parameters in (("stuck", 'parameters { key: "isolated" value { string_value: "1" } }'), ("beside", "")):
        model_folder(models / name, f'backend: "scripted_llm" {parameters}')
        script = {"answers": ANSWERS, "hangs_on": "hang", "step_s": STEP_S if name == "stuck" else 0.0}
        (models / name / "1/script.json").write_text(json.dumps(script))
    with serve(models, f"--hang-timeout-secs={TIMEOUT_S}") as running:
        yield running


def complete(server: Any, prompt: str, model: str = "stuck") -> tuple[int, Any]:
    return server.ask("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 100})


def child_of(server: Any) -> int:
    process = server.process.pid
    (child,) = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return int(child)


def is_ready(server: Any, model: str) -> bool:
    return server.get(f"/v2/models/{model}/ready")[0] == 200 and server.get("/v2/health/ready")[0] == 200


def stop_process(server: Any, eventually: Callable[..., bool]) -> None:
    """Stop the engine's process, which then answers nothing: as one whose library holds the GIL in a step."""
    child = child_of(server)
    os.kill(child, signal.SIGSTOP)
    # On a busy machine its other threads run on until the one that takes the signal is scheduled.
    threads = list(Path(f"/proc/{child}/task").iterdir())
    assert eventually(lambda: {(thread / "stat").read_text().rpartition(") ")[2][0] for thread in threads} == {"T"})


@pytest.mark.parametrize(
    ("begin", "prompt"),
    [(lambda server, eventually: None, "hang"), (stop_process, "hello")],
    ids=["step_that_never_ends", "process_that_answers_nothing"],
)
def test_a_stuck_engine_is_killed_and_its_model_restarts(server: Any, begin: Callable[..., None], prompt: str) -> None:
    assert eventually(lambda: complete(server, "hello")[0] == 200)
    before = child_of(server)
    begin(server, eventually)
    answers: list[tuple[int, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(complete(server, prompt)))
    asking.start()
    while asking.is_alive():
        status, answer = complete(server, "count", "beside")
        assert (status, answer["choices"][0]["text"]) == (200, ANSWERS["count"])
        asking.join(0.05)
    ((status, answer),) = answers
    assert status == 500
    assert f"did not come back within --hang-timeout-secs={TIMEOUT_S} and was killed" in answer["error"]["message"]
    assert eventually(lambda: complete(server, "hello")[0] == 200)
    assert child_of(server) != before
    assert is_ready(server, "stuck")
    assert is_ready(server, "beside")
    assert "model.hung" in json.dumps(server.ask("/edge/v1/events?follow=false")[1])


def test_a_client_that_disconnects_before_its_first_token_frees_its_queue_slot(tmp_path: Path) -> None:
    """One request fills the KV cache for a minute, in which the counts change with each step; two may wait."""
    (tmp_path / "slow/1").mkdir(parents=True)
    parameters = {"isolated": "1", "max_queue_size": "2", "num_kv_blocks": "1"}
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    (tmp_path / "slow/config.pbtxt").write_text('backend: "scripted_llm" ' + " ".join(lines))
    script = {"answers": {"hello": "x" * 6000}, "step_s": 0.02, "block_tokens": 4000}
    (tmp_path / "slow/1/script.json").write_text(json.dumps(script))
    with serve(tmp_path) as running:

        def ask(**more: Any) -> socket.socket:
            body = json.dumps({"model": "slow", "prompt": "hello", "max_tokens": 3900, **more}).encode()
            host, _, port = running.http.rpartition(":")
            client = socket.create_connection((host, int(port)), 30)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {running.http}\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            return client

        def counts(running_count: int, waiting: int) -> bool:
            text = running.read_metrics()
            labels = '{model="slow",model_name="slow",version="1"}'
            return (
                f"vllm:num_requests_running{labels} {running_count}.0" in text
                and f"vllm:num_requests_waiting{labels} {waiting}.0" in text
            )

        with ask():
            assert eventually(lambda: counts(1, 0))
            schema = {"type": "object", "properties": {"a": {"type": "number"}}}
            named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            for more in ({}, {"response_format": named}, {"stream": True}):
                for _ in range(2):
                    waiting = [ask(**more) for _ in range(2)]
                    assert eventually(lambda: counts(1, 2))
                    with ask() as refused:
                        assert b"503" in refused.recv(100)
                    for client in waiting:
                        client.close()
                    assert eventually(lambda: counts(1, 0))
        assert eventually(lambda: counts(0, 0))


def test_many_short_steps_above_the_time_limit_are_no_hang(server: Any) -> None:
    assert eventually(lambda: complete(server, "hello")[0] == 200)
    before = child_of(server)
    status, answer = complete(server, "long")
    assert (status, answer["choices"][0]["text"]) == (200, ANSWERS["long"])
    assert child_of(server) == before
