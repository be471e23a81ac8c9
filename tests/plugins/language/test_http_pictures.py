"""Pictures in calls of the text APIs: in each API's own form they become the input `image` and the same messages, and
URLs are fetched from allowed hosts alone."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import InvalidRequest, LoadError
from edge_server.plugins.language.openai import remote_pictures
from edge_server.plugins.language.openai.remote_pictures import fetch_pictures, read_hosts
from tests.kit.site import Handler, Site

JPEG = (Path(__file__).parents[2] / "data/coffee.jpg").read_bytes()
BASE64 = base64.b64encode(JPEG).decode()
URL = f"data:image/jpeg;base64,{BASE64}"
SEER = ModelSpec(
    "seer",
    "stub",
    "",
    max_batch_size=0,
    inputs=tuple(
        InputSpec(name, DType.BYTES, (-1,), is_optional=True)
        for name in ("text_input", "messages", "image", "sampling_parameters")
    ),
    outputs=(OutputSpec("text_output", DType.BYTES, (-1,)),),
    instance_groups=(),
    is_decoupled=True,
)
QUESTION = {"type": "text", "text": "What is this?"}


def answer(request: Request) -> list[Response]:
    text = Tensor("text_output", DType.BYTES, np.array([b"a cup"], object))
    return [Response(request.model, 1, request.id, outputs=(text,), is_final=True)]


@pytest.fixture
def seer(site: Any) -> Any:
    site.service.models["seer"] = (SEER, answer)
    return site


def sent(site: Any, path: str, **members: Any) -> tuple[Any, list[bytes]]:
    """Return the messages and the pictures of the request that a call becomes."""
    reply = site.post(path, {"model": "seer", **members})
    assert reply.status == 200, reply.body
    inputs = site.service.requests.pop().inputs
    return inputs["messages"].value, inputs["image"].array.tolist()


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def test_parts_of_openais_chats_keep_their_places(seer: Any) -> None:
    other = base64.b64encode(b"\x89PNG rest").decode()
    messages = [
        {"role": "system", "content": "Be brief."},
        *chat(image(URL), QUESTION, image(f"data:;base64,{other}")),
        {"role": "assistant", "content": "A cup."},
        *chat(QUESTION),
    ]
    found, pictures = sent(seer, "/v1/chat/completions", messages=messages)
    assert pictures == [JPEG, b"\x89PNG rest"]
    assert [message["content"] for message in found] == [
        "Be brief.", [{"type": "image"}, QUESTION, {"type": "image"}], "A cup.", QUESTION["text"],
    ]  # fmt: skip


def test_the_request_of_frigates_openai_provider(seer: Any) -> None:
    """As `frigate/genai/openai.py` of github.com/blakeblackshear/frigate sends it."""
    messages = chat(QUESTION, image(URL, detail="low"), image(URL, detail="low"))
    found, pictures = sent(seer, "/v1/chat/completions", messages=messages)
    assert found == chat(QUESTION, {"type": "image"}, {"type": "image"})
    assert pictures == [JPEG, JPEG]


def test_the_request_of_frigates_ollama_provider(seer: Any) -> None:
    """As `frigate/genai/ollama.py` of github.com/blakeblackshear/frigate sends it, by ollama's Python package."""
    options = {"temperature": 0.5, "repeat_penalty": 1.05, "presence_penalty": 0.3}
    found, pictures = sent(
        seer, "/api/generate", prompt="What is this?", stream=False, options=options, images=[BASE64, BASE64]
    )
    assert found == chat({"type": "image"}, {"type": "image"}, QUESTION)
    assert pictures == [JPEG, JPEG]


def test_the_request_of_home_assistants_ollama_integration(seer: Any) -> None:
    """As `homeassistant/components/ollama/entity.py` of github.com/home-assistant/core sends a task with a camera's
    picture, by ollama's Python package."""
    found, pictures = sent(
        seer, "/api/chat", stream=True, keep_alive=-1, options={"num_ctx": 8192}, think=False,
        messages=[
            {"role": "system", "content": "You are a voice assistant."},
            {"role": "user", "content": "What is this?", "images": [BASE64]},
        ],
    )  # fmt: skip
    assert found["messages"][1:] == chat({"type": "image"}, QUESTION)
    assert pictures == [JPEG]


def test_blocks_of_anthropics_messages_keep_their_places(seer: Any) -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": BASE64}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    found, pictures = sent(
        seer, "/v1/messages", max_tokens=9,
        messages=[{"role": "user", "content": [result, QUESTION, block]}],
    )  # fmt: skip
    assert [message["content"] for message in found] == [[{"type": "image"}], [QUESTION, {"type": "image"}]]
    assert pictures == [JPEG, JPEG]


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (image("data:image/png;base64,A"), "'messages[0].content[0].image_url.url': expected base64"),
        (image("data:image/png,A"), "expected a URL like data:image/jpeg;base64,..., or one of http or https"),
        (image("file:///etc/passwd"), "expected a URL like data:image/jpeg;base64,..., or one of http or https"),
        (image("http://a/" + "a" * 3000), "expected at most 2048 characters, got 3009"),
        ({"type": "image_url"}, "'messages[0].content[0].image_url.url': expected a text, got null"),
        (image("http://127.0.0.1:9/a"), "the host '127.0.0.1:9' is not in the model's parameter image_hosts"),
        ({"type": "input_audio"}, "'messages[0].content': expected parts of type text or image_url, got input_audio"),
    ],
)
def test_a_part_that_is_no_picture_is_refused(seer: Any, part: Any, problem: str) -> None:
    reply = seer.post("/v1/chat/completions", {"model": "seer", "messages": chat(part)})
    assert (reply.status, reply.json["error"]["param"]) == (400, "messages")
    assert problem in reply.json["error"]["message"]


@pytest.mark.parametrize("url", [URL, "http://127.0.0.1:9/a"])
def test_a_model_of_texts_gets_no_picture(seer: Any, url: str) -> None:
    inputs = tuple(item for item in SEER.inputs if item.name != "image")
    seer.service.models["seer"] = (replace(SEER, inputs=inputs), answer)
    reply = seer.post("/v1/chat/completions", {"model": "seer", "messages": chat(image(url))})
    assert (reply.status, reply.json["error"]["message"]) == (400, "'messages': model 'seer' takes no pictures")


class _Pictures(Handler):
    """Serves JPEG under /picture, and redirects from /to/URL to the URL."""

    def do_GET(self) -> None:
        if self.path.startswith("/to/"):
            self.answer(status=302, Location=self.path.removeprefix("/to/"))
        elif self.path == "/large":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(bytes(1001))
        elif self.path == "/slow":
            self.server.released.wait(20)  # type: ignore[attr-defined]
        else:
            self.answer(JPEG, 200 if self.path == "/picture?size=1" else 404)


@pytest.fixture
def host() -> Iterator[str]:
    with Site(_Pictures) as server:
        server.released = threading.Event()  # type: ignore[attr-defined]
        yield f"127.0.0.1:{server.server_port}"
        server.released.set()  # type: ignore[attr-defined]


def test_a_picture_is_fetched_from_an_allowed_host(seer: Any, host: str) -> None:
    seer.service.models["seer"] = (replace(SEER, parameters={"image_hosts": f"nvr.local, {host}"}), answer)
    messages = chat(image(f"http://{host}/picture?size=1"), image(URL), image(f"HTTP://{host}/to//picture?size=1"))
    _, pictures = sent(seer, "/v1/chat/completions", messages=messages)
    assert pictures == [JPEG, JPEG, JPEG]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/none", "cannot be fetched: status 404"),
        ("/to/http://127.0.0.1:9/a", "the host '127.0.0.1:9' is not in the model's parameter image_hosts"),
        ("/to/file:///etc/passwd", "expected a URL of http or https"),
        ("/to//to//to//to//picture", "more than 3 redirects"),
        ("/large", "expected files of at most 0 MiB together"),
        ("/slow", "cannot be fetched: "),
    ],
)
def test_a_picture_that_cannot_be_had_is_an_error(
    monkeypatch: pytest.MonkeyPatch, host: str, path: str, problem: str
) -> None:
    monkeypatch.setattr(remote_pictures, "MAX_BYTES", 1000)
    monkeypatch.setattr(remote_pictures, "_TIMEOUT_S", 0.5 if path == "/slow" else 10.0)
    with pytest.raises(InvalidRequest) as caught:
        fetch_pictures([f"http://{host}{path}"], {host})
    assert problem in caught.value.message


@pytest.mark.parametrize(
    "url", ["http://a@127.0.0.1/", "http://127.0.0.1:99999/", "http://[::1/", "http://127.0.0.1/a b", "http:///a"]
)
def test_a_url_that_is_none_is_an_error(url: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be fetched: "):
        fetch_pictures([url], {"127.0.0.1"})


def test_pictures_share_one_deadline(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(remote_pictures, "_TIMEOUT_S", 0.0)
    with pytest.raises(InvalidRequest, match="cannot be fetched: the pictures took 0 s"):
        fetch_pictures([JPEG, f"http://{host}/picture?size=1"], {host})


def test_ollamas_clients_are_told_that_a_model_sees(seer: Any) -> None:
    assert seer.post("/api/show", {"model": "seer"}).json["capabilities"] == ["completion", "vision"]


def test_many_pictures_are_refused_before_any_is_fetched() -> None:
    with pytest.raises(InvalidRequest, match="expected at most 16 pictures, got 17"):
        fetch_pictures(["http://127.0.0.1:9/"] * 17, {"127.0.0.1:9"})


def test_hosts_are_listed_with_commas() -> None:
    assert read_hosts("seer", "NVR.local, 10.0.0.5:5000,[::1]:80,") == {"nvr.local", "10.0.0.5:5000", "[::1]:80"}
    for wrong in ("http://nvr.local", "a b", "*", ",".join(map(str, range(65)))):
        with pytest.raises(LoadError, match="model 'seer': parameter image_hosts: expected up to 64 hosts"):
            read_hosts("seer", wrong)
