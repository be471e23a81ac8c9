"""Language models through a real server: equal text over every protocol, and real engines.

The scripted model needs no library. The tests marked `full` serve tests/data/tiny_llm with OpenVINO GenAI or llama.cpp.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client

from tests.kit.child_processes import children_of
from tests.kit.eventually import eventually
from tests.kit.infer_input import infer_input
from tests.kit.model_folder import model_folder, parameters
from tests.kit.server import serve
from tests.kit.triton_stream import TritonStream, is_final

TINY = Path(__file__).parents[1] / "data/tiny_llm/tiny.gguf"
COUNT = (
    "three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty"
)
ANSWERS = {"hello": "Hello! How can I help you?", "count": COUNT}


real_engine = [
    pytest.mark.full,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("openvino_genai", "openai")),
        reason="needs openvino-genai and openai, of the extra test-all",
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("models")
    model_folder(models / "talker", 'backend: "scripted_llm"', {"1/script.json": json.dumps({"answers": ANSWERS})})
    with serve(models) as running:
        yield running


def chat(content: str, **more: Any) -> dict[str, Any]:
    return {"model": "talker", "messages": [{"role": "user", "content": content}], **more}


def events(server: Any, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the events of a stream, each parsed as JSON, except "[DONE]"."""
    status, text = server.request("POST", path, json.dumps(body).encode())
    assert status == 200, text
    found = [line.removeprefix("data: ") for line in text.decode().split("\n\n") if line]
    return [item if item == "[DONE]" else json.loads(item) for item in found]


def grpc_stream(server: Any, prompt: str, **sampling: Any) -> str:
    """Return the text that tritonclient's stream gives."""
    sampling_text = json.dumps({"max_tokens": 200, **sampling}).encode()
    inputs = [
        infer_input(grpc_client, "text_input", np.array([prompt.encode()], object)),
        infer_input(grpc_client, "stream", np.array([True])),
        infer_input(grpc_client, "sampling_parameters", np.array([sampling_text], object)),
    ]
    with TritonStream(server.grpc) as stream:
        stream.send("talker", inputs, enable_empty_final_response=True)
        text = ""
        while True:
            result = stream.result()
            outputs = result.as_numpy("text_output")
            text += "" if outputs is None else outputs[0].decode()
            if is_final(result):
                return text


def test_every_protocol_gives_the_same_text(server: Any) -> None:
    parameters = {"max_tokens": 200}
    flat = {"text_input": "count", "exclude_input_in_output": True, "parameters": parameters}
    _, answer = server.ask("/v2/models/talker/generate", flat)
    streamed = events(server, "/v2/models/talker/generate_stream", {**flat, "stream": True})
    _, completion = server.ask("/v1/completions", {"model": "talker", "prompt": "count", "max_tokens": 200})
    _, chatted = server.ask("/v3/chat/completions", chat("count"))
    texts = {
        answer["text_output"],
        "".join(event["text_output"] for event in streamed),
        grpc_stream(server, "count"),
        completion["choices"][0]["text"],
        chatted["choices"][0]["message"]["content"],
    }
    assert texts == {COUNT}


# -- a real engine


def openvino_model(folder: Path, more: str) -> None:
    model_folder(folder, f'backend: "openvino_genai" {more}', {"1/model.gguf": TINY.read_bytes()})


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two models with OpenVINO GenAI, of which one computes in f32."""
    models = tmp_path_factory.mktemp("tiny")
    for name, more in (("tiny", ""), ("exact", parameters(deterministic="true", num_kv_blocks=64))):
        openvino_model(models / name, more)
    with serve(models) as running:
        yield running


@pytest.fixture
def client(tiny_server: Any) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=tiny_server.url("/v1"), api_key="none", max_retries=0) as opened:
        yield opened


def ask(client: Any, question: str, **more: Any) -> Any:
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(**{"model": "exact", "messages": messages, "temperature": 0, **more})


class TestRealEngine:
    pytestmark = real_engine

    def test_a_model_needs_only_a_folder_with_a_model_file(self, client: Any) -> None:
        answer = ask(client, "what is the capital of France?", model="tiny")
        assert answer.choices[0].message.content == "The capital of France is Paris."

    def test_tokens_of_a_chat_are_those_of_its_usage(self, client: Any, tiny_server: Any) -> None:
        question = "what is the capital of Japan?"
        messages = [{"role": "user", "content": question}]
        _, found = tiny_server.ask("/v2/models/exact/generate", {"messages": json.dumps(messages), "tokenize": True})
        assert len(found["token_ids"]) == ask(client, question).usage.prompt_tokens
        assert found["max_context"] == 512
        _, counted = tiny_server.ask("/v1/messages/count_tokens", {"model": "exact", "messages": messages})
        assert counted == {"input_tokens": len(found["token_ids"])}

    def test_a_killed_engine_fails_its_streams_and_is_restarted(self, client: Any, tiny_server: Any) -> None:
        import openai

        folder = Path(f"/proc/{tiny_server.process.pid}")
        assert ask(client, "count from three").choices[0].message.content == COUNT
        files, pages = len(os.listdir(folder / "fd")), int((folder / "statm").read_text().split()[1])
        # A client of its own, whose connections end with it: one of an answer that ended before the kill stays open.
        with client.copy(http_client=openai.DefaultHttpxClient()) as streaming:
            streams = [ask(streaming, "count from zero", stream=True) for _ in range(4)]
            children = children_of(tiny_server.process.pid)
            assert len(children) == 2
            for child in children:
                os.kill(child, signal.SIGKILL)
            ended = 0
            for stream in streams:
                try:
                    ended += any(chunk.choices[0].finish_reason for chunk in stream)
                except openai.APIError:
                    ended += 1
        assert ended == 4
        assert tiny_server.get("/v2/health/live")[0] == 200
        retrying = client.with_options(max_retries=5)
        assert ask(retrying, "count from three").choices[0].message.content == COUNT
        assert eventually(lambda: len(os.listdir(folder / "fd")) <= 1.1 * files)
        assert int((folder / "statm").read_text().split()[1]) <= 1.1 * pages


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.skipif(
    "EDGE_TEST_LANGUAGE_MODEL" not in os.environ or importlib.util.find_spec("openvino_genai") is None,
    reason="SmolLM2 is not here: tests/e2e/fetch_pipeline_models.sh fetches it; it needs openvino-genai too",
)
def test_a_real_model_knows_the_capital_of_france(tmp_path: Path) -> None:
    import openai

    (tmp_path / "talker/1").mkdir(parents=True)
    (tmp_path / "talker/1/model.gguf").symlink_to(os.environ["EDGE_TEST_LANGUAGE_MODEL"])
    (tmp_path / "talker/config.pbtxt").write_text('backend: "openvino_genai"')
    with (
        serve(tmp_path, "--allow-external-links") as running,
        openai.OpenAI(base_url=running.url("/v1"), api_key="none") as client,
    ):
        answer = ask(client, "What is the capital of France?", model="talker", max_tokens=40)
        assert "Paris" in answer.choices[0].message.content
        prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        assert "Paris" in grpc_stream(running, prompt, temperature=0)


class TestIdleModels:
    pytestmark = real_engine

    def test_an_idle_model_frees_its_memory_and_the_next_request_loads_it(self, tmp_path: Path) -> None:
        import openai

        openvino_model(tmp_path / "exact", parameters(idle_unload_s=1, niceness=3))
        with (
            serve(tmp_path) as running,
            openai.OpenAI(base_url=running.url("/v1"), api_key="none", max_retries=0) as client,
        ):
            assert eventually(lambda: not children_of(running.process.pid))
            assert [model.id for model in client.models.list().data] == ["exact"]
            answer = ask(client, "say hello", extra_body={"keep_alive": "1h"})
            assert answer.choices[0].message.content == ANSWERS["hello"]
            own = os.getpriority(os.PRIO_PROCESS, running.process.pid)
            assert min(own + 3, 19) in [
                os.getpriority(os.PRIO_PROCESS, pid) for pid in children_of(running.process.pid)
            ]
            ask(client, "say hello", extra_body={"keep_alive": 0})
            assert eventually(lambda: not children_of(running.process.pid))


class TestFilesThatCannotBeServed:
    pytestmark = real_engine

    def test_a_model_that_does_not_fit_into_memory_is_refused_with_size_and_limit(self, tmp_path: Path) -> None:
        for name, blocks in (("huge", 10_000_000_000), ("small", 64)):
            openvino_model(tmp_path / name, parameters(num_kv_blocks=blocks))
        with serve(tmp_path) as running:
            reason = running.index()["huge"]["reason"]
            assert re.search(r"memory is short: \d+ MiB are available, .* about \d+ MiB", reason)
            (report,) = running.ask("/edge/v1/models")[1]["models"]
            assert any(re.match(r"needs about \d+ MiB of memory: process", note) for note in report["notes"])
            assert report["load_rss_bytes"] > 120 << 20
