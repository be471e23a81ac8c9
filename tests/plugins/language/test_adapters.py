"""GGUF files without a configuration, with adapters beside them: which one answers over each API for texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.model_folder import model_folder
from tests.kit.server import serve_here

pytest.importorskip("xllamacpp", reason="needs xllamacpp, of the extra test-all")
pytestmark = pytest.mark.full

TINY = Path(__file__).parents[2] / "data/tiny_llm/tiny.gguf"
QUESTION: dict[str, object] = {"messages": [{"role": "user", "content": "say hello"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The folder and the file alone, without a configuration; one with adapters."""
    models = tmp_path_factory.mktemp("llama_cpp")
    for name in ("adapted", "talker"):
        model_folder(models / name, files={"1/model.gguf": TINY.read_bytes()})
    shutil.copytree(TINY.parent / "lora", models / "adapted/1/adapters")
    with serve_here(models) as running:
        yield running


def test_a_file_without_a_configuration_is_served_by_it_and_the_index_says_why(server: Any) -> None:
    assert "llama_cpp: fixed order" in server.notes("talker")


def test_an_adapter_is_chosen_by_the_models_name_in_every_api(server: Any) -> None:
    _, listed = server.ask("/v1/models")
    parents = {item["id"]: item.get("parent") for item in listed["data"]}
    assert parents == {
        "adapted": None, "adapted:first": "adapted", "adapted:second": "adapted", "talker": None
    }  # fmt: skip
    assert server.ask("/v1/models/adapted:first")[1]["id"] == "adapted:first"
    assert {item["name"] for item in server.ask("/api/tags")[1]["models"]} >= {"adapted:first", "adapted:latest"}
    assert "llama_cpp: fixed order for LoRA adapters" in server.notes("adapted")
    texts: dict[str, str] = {}
    for name in ("adapted", "adapted:first", "adapted:second"):
        call = {**QUESTION, "model": name, "max_tokens": 12}
        _, answer = server.ask("/v1/chat/completions", {**call, "temperature": 0})
        assert answer["model"] == name
        texts[name] = answer["choices"][0]["message"]["content"]
        _, answer = server.ask("/v1/messages", {**call, "temperature": 0})
        assert answer["content"][0]["text"] == texts[name]
        options = {"temperature": 0, "num_predict": 12}
        call = {**QUESTION, "model": name, "stream": False, "options": options}
        assert server.ask("/api/chat", call)[1]["message"]["content"] == texts[name]
        sampling = json.dumps({"temperature": 0, "max_tokens": 12, "lora_name": name.partition(":")[2]})
        call = {"messages": json.dumps(QUESTION["messages"]), "sampling_parameters": sampling}
        assert server.ask("/v2/models/adapted/generate", call)[1]["text_output"] == texts[name]
    assert "Hello! How can I help you?".startswith(texts["adapted"])
    assert len(set(texts.values())) == 3
    _, counted = server.ask("/v1/messages/count_tokens", {**QUESTION, "model": "adapted:first"})
    assert counted["input_tokens"] > 5


def test_an_adapter_that_is_not_there_is_an_unknown_model(server: Any) -> None:
    for model in ("adapted:third", "talker:first", "nosuch:first"):
        status, answer = server.ask("/v1/chat/completions", {**QUESTION, "model": model})
        assert status == 404
        assert model in answer["error"]["message"]
    sampling = json.dumps({"lora_name": "third"})
    call = {"text_input": "say hello", "sampling_parameters": sampling}
    status, answer = server.ask("/v2/models/adapted/generate", call)
    assert status == 400
    assert "lora_name: no adapter 'third'; it has first, second" in answer["error"]
