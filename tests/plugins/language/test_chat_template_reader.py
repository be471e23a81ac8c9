"""The chat template of a tokenizer's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_server.core.model_spec import ChatTemplate
from edge_server.errors import BadModelConfig
from edge_server.plugins.language.text.chat_template_reader import read_chat_template


def write(folder: Path, config: object = None, template: str = "") -> Path:
    (folder / "tokenizer").mkdir()
    if config is not None:
        (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(config))
    if template:
        (folder / "tokenizer/chat_template.jinja").write_text(template)
    return folder


def test_the_configuration_has_the_template_and_the_special_tokens(tmp_path: Path) -> None:
    config = {"chat_template": "T", "bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": None}
    found = read_chat_template("m", write(tmp_path, config), "tokenizer")
    assert found == ChatTemplate("T", {"bos_token": "<s>", "eos_token": "</s>"}, ("</s>", "<s>"))


@pytest.mark.parametrize("is_in_config", [True, False])
def test_all_special_tokens_that_the_files_tell_are_known(tmp_path: Path, is_in_config: bool) -> None:
    added = [
        {"id": 0, "content": "<|im_end|>", "special": True},
        {"id": 1, "content": "<think>", "special": False},
        {"id": 2, "content": "[PAD]", "special": True},
        {"id": 3, "content": "|", "special": True},
    ]
    config = {"chat_template": "{{ '<|im_start|>' + x }}", "additional_special_tokens": ["<a>", {"content": "<b>"}]}
    if is_in_config:
        config["added_tokens_decoder"] = {str(item["id"]): item for item in added}
    write(tmp_path, config)
    if not is_in_config:
        (tmp_path / "tokenizer/tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    found = read_chat_template("m", tmp_path, "tokenizer")
    assert found.special_texts == ("<a>", "<b>", "<|im_end|>", "<|im_start|>", "[PAD]")


def test_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    assert read_chat_template("m", write(tmp_path, {"chat_template": "T"}, "F"), "tokenizer").text == "F"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "tool_use", "template": "A"}, {"name": "default", "template": "B"}]}
    assert read_chat_template("m", write(tmp_path, config), "tokenizer").text == "B"


@pytest.mark.parametrize(
    ("config", "folder", "said"),
    [
        (None, "tokenizer", "expected 'tokenizer/chat_template.jinja', or 'chat_template' in"),
        ({"chat_template": 3}, "tokenizer", "expected 'tokenizer/chat_template.jinja', or"),
        ({"chat_template": ["T"]}, "tokenizer", "expected 'tokenizer/chat_template.jinja', or"),
        ([], "tokenizer", "is not a JSON object"),
        ({"chat_template": "T"}, "elsewhere", "expected 'elsewhere/chat_template.jinja', or"),
        ({"chat_template": "T"}, "../tokenizer", "expected a relative path inside the model's directory"),
    ],
)
def test_errors_name_the_field(tmp_path: Path, config: object, folder: str, said: str) -> None:
    with pytest.raises(BadModelConfig, match="model 'm': parameter chat_tokenizer: ") as caught:
        read_chat_template("m", write(tmp_path, config), folder)
    assert said in caught.value.message


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    (write(tmp_path) / "tokenizer/tokenizer_config.json").write_text("{")
    with pytest.raises(BadModelConfig, match=r"'tokenizer/tokenizer_config.json' is not JSON"):
        read_chat_template("m", tmp_path, "tokenizer")
