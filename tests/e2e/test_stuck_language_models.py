"""Requests of language models whose client has disconnected or whose engine hangs are removed completely."""

from __future__ import annotations

import json
import os
import signal
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


def test_many_short_steps_above_the_time_limit_are_no_hang(server: Any) -> None:
    assert eventually(lambda: complete(server, "hello")[0] == 200)
    before = child_of(server)
    status, answer = complete(server, "long")
    assert (status, answer["choices"][0]["text"]) == (200, ANSWERS["long"])
    assert child_of(server) == before
