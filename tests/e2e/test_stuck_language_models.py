"""The second line behind the check of schemas: an engine that is stuck is killed and started again by itself."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ANSWERS = {"hello": "Hello!", "count": "one two three"}
TIMEOUT_S = 1


@pytest.fixture(scope="module")
def server(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two models with a script: `stuck` in a process of its own, where the question "hang" never ends, and `beside`."""
    models = tmp_path_factory.mktemp("models")
    for name, parameters in (("stuck", 'parameters { key: "isolated" value { string_value: "1" } }'), ("beside", "")):
        (models / name / "1").mkdir(parents=True)
        (models / name / "config.pbtxt").write_text(f'backend: "scripted_llm" {parameters}')
        (models / name / "1/script.json").write_text(json.dumps({"answers": ANSWERS, "hangs_on": "hang"}))
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


def stop_process(server: Any) -> None:
    """Stop the engine's process, which then answers nothing: as one whose library holds the GIL in a step."""
    os.kill(child_of(server), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("begin", "prompt"),
    [(lambda server: None, "hang"), (stop_process, "hello")],
    ids=["step_that_never_ends", "process_that_answers_nothing"],
)
def test_a_stuck_engine_is_killed_and_its_model_comes_back_by_itself(
    server: Any, eventually: Callable[..., bool], begin: Callable[[Any], None], prompt: str
) -> None:
    assert eventually(lambda: complete(server, "hello")[0] == 200)
    before = child_of(server)
    begin(server)
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


def test_steps_that_follow_each_other_for_longer_than_the_limit_are_no_hang(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "slow/1").mkdir(parents=True)
    (tmp_path / "slow/config.pbtxt").write_text(
        'backend: "scripted_llm" parameters { key: "isolated" value { string_value: "1" } }'
    )
    text = "x" * 60
    script = {"answers": {"hello": text}, "step_s": 0.05}
    (tmp_path / "slow/1/script.json").write_text(json.dumps(script))
    with serve(tmp_path, "--hang-timeout-secs=0.5") as running:
        status, answer = complete(running, "hello", "slow")
        assert (status, answer["choices"][0]["text"]) == (200, text)
