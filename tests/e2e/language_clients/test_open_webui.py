"""Open WebUI, unchanged, with this server as its OpenAI API and as its ollama: models, chats whole and streamed."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.kit.model_folder import model_folder
from tests.kit.server import serve

PROGRAM = os.environ.get("EDGE_TEST_OPEN_WEBUI", "")
START_S = 180.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PROGRAM, reason="needs EDGE_TEST_OPEN_WEBUI, see tests/e2e/fetch_open_webui.sh"),
]


class WebUi:
    """Calls Open WebUI as its page does."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._token = ""

    def call(self, path: str, body: Any = None) -> tuple[int, str]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self._address + path, data, headers), timeout=60
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def sign_in(self) -> bool:
        status, text = self.call("/api/v1/auths/signin", {"email": "", "password": ""})
        self._token = json.loads(text)["token"] if status == 200 else ""
        return bool(self._token)

    def chat(self, model: str, question: str, *, is_streamed: bool = False) -> str:
        messages = [{"role": "user", "content": question}]
        status, text = self.call("/api/chat/completions", {"model": model, "messages": messages, "stream": is_streamed})
        assert status == 200, text
        if not is_streamed:
            return str(json.loads(text)["choices"][0]["message"]["content"])
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        pieces = [
            choice["delta"].get("content") or "" for event in events for choice in json.loads(event).get("choices", ())
        ]
        assert len(pieces) > 1
        return "".join(pieces)


@pytest.fixture(scope="module")
def web_ui(free_ports: Callable[[int], list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebUi]:
    models, home = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("home")
    model_folder(models / "talker", 'backend: "scripted_llm"')
    script = {"answers": {"hello": "Hello! How can I help you?"}}
    (models / "talker/1/script.json").write_text(json.dumps(script))
    (port,) = free_ports(1)
    with serve(models) as server, open(home / "log", "w") as log:
        address = f"http://{server.http}"
        settings = {
            "HOME": str(home), "DATA_DIR": str(home / "data"), "WEBUI_AUTH": "false", "OFFLINE_MODE": "true",
            "HF_HUB_OFFLINE": "1", "RAG_EMBEDDING_ENGINE": "ollama", "DO_NOT_TRACK": "true", "PATH": os.environ["PATH"],
            "OPENAI_API_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": "none", "OLLAMA_BASE_URL": address,
        }  # fmt: skip
        command = [PROGRAM, "serve", "--host", "127.0.0.1", "--port", str(port)]
        with subprocess.Popen(command, env=settings, cwd=home, stdout=log, stderr=subprocess.STDOUT) as process:
            found = WebUi(f"http://127.0.0.1:{port}")
            try:
                assert eventually(found.sign_in, START_S), Path(log.name).read_text()
                yield found
            finally:
                process.terminate()


def test_the_models_of_both_apis_are_offered(web_ui: WebUi) -> None:
    models = json.loads(web_ui.call("/api/models")[1])["data"]
    assert {(item["id"], item["owned_by"]) for item in models} >= {("talker", "openai"), ("talker:latest", "ollama")}


@pytest.mark.parametrize("model", ["talker", "talker:latest"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_chat_gets_the_models_answer(web_ui: WebUi, model: str, is_streamed: bool) -> None:
    assert web_ui.chat(model, "hello", is_streamed=is_streamed) == "Hello! How can I help you?"


def test_ollamas_other_calls_are_answered(web_ui: WebUi) -> None:
    assert "version" in json.loads(web_ui.call("/ollama/api/version")[1])
    assert [item["name"] for item in json.loads(web_ui.call("/ollama/api/ps")[1])["models"]] == ["talker:latest"]
    shown = json.loads(web_ui.call("/ollama/api/show", {"model": "talker:latest"})[1])
    assert "completion" in shown["capabilities"]


def test_what_this_server_does_not_do_is_said(web_ui: WebUi) -> None:
    status, text = web_ui.call("/ollama/api/pull", {"model": "llama3"})
    assert status >= 400
    assert "unknown path: POST /api/pull" in text
