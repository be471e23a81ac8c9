"""Reader of a chat template: the parameter `chat_tokenizer` of a model names a folder with a tokenizer of Hugging Face.

The template is chat_template.jinja, else the member `chat_template` of tokenizer_config.json, whose members such as
`bos_token` are the special tokens (https://huggingface.co/docs/transformers/chat_templating).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_server.core.model_spec import ChatTemplate
from edge_server.errors import BadModelConfig
from edge_server.repository.safe_paths import check_relative, find_inside

MAX_FILE_BYTES = 32 << 20
"""Of tokenizer_config.json, which lists added tokens."""


def read_chat_template(model: str, model_dir: Path, folder: str) -> ChatTemplate:
    """Return the template of the tokenizer in `folder`, which is relative to `model_dir`.

    Raises BadModelConfig if there is none, or for files that are outside `model_dir`, too large or damaged.
    """
    what = f"model '{model}': parameter chat_tokenizer"
    config: Mapping[str, Any] = {}
    if (text := _read(what, model_dir, f"{folder}/tokenizer_config.json")) is not None:
        try:
            config = json.loads(text)
        except ValueError as error:
            raise BadModelConfig(f"{what}: '{folder}/tokenizer_config.json' is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise BadModelConfig(f"{what}: '{folder}/tokenizer_config.json' is not a JSON object")
    template = _read(what, model_dir, f"{folder}/chat_template.jinja") or config.get("chat_template")
    if isinstance(template, list):  # of several templates, e.g. one for tools
        template = next(
            (item.get("template") for item in template if isinstance(item, dict) and item.get("name") == "default"),
            None,
        )
    if not isinstance(template, str) or not template:
        raise BadModelConfig(
            f"{what}: expected '{folder}/chat_template.jinja', or 'chat_template' in '{folder}/tokenizer_config.json'"
        )
    tokens: dict[str, str] = {}
    for key, value in config.items():
        token = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(token, str):
            tokens[key] = token
    return ChatTemplate(template, tokens)


def _read(what: str, model_dir: Path, name: str) -> str | None:
    """Return the text of a file, None if there is no such file."""
    if not (model_dir / check_relative(name, what)).exists():
        return None
    path = find_inside(model_dir, name, what)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadModelConfig(f"{what}: '{name}' cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise BadModelConfig(f"{what}: '{name}' is larger than {MAX_FILE_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadModelConfig(f"{what}: '{name}' is not UTF-8 text (byte {error.start})") from error
