"""Reader of a language model's chat template and special tokens from the files of its Hugging Face tokenizer.

The template is chat_template.jinja, else the member `chat_template` of tokenizer_config.json, whose members such as
`bos_token` are the special tokens (https://huggingface.co/docs/transformers/chat_templating). All special tokens are in
`added_tokens_decoder` of that file, or in tokenizer.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_server.core.model_spec import ChatTemplate
from edge_server.errors import BadModelConfig
from edge_server.repository.disk.safe_paths import check_relative, find_inside

MAX_FILE_BYTES = 32 << 20
"""Of tokenizer_config.json, which lists added tokens."""

_MARKER = re.compile(r"<\|[^<>|\s]{1,64}\|>")
"""Text that a template writes for a special token, such as <|im_end|>: the files may not list it."""


def read_chat_template(model: str, model_dir: Path, folder: str) -> ChatTemplate:
    """Return the template of the tokenizer in `folder`, which is relative to `model_dir`.

    Raises BadModelConfig if there is none, or for files that are outside `model_dir`, too large or damaged.
    """
    prefix = f"model '{model}': parameter chat_tokenizer"
    config = _read_json(prefix, model_dir, f"{folder}/tokenizer_config.json")
    template = _read(prefix, model_dir, f"{folder}/chat_template.jinja") or config.get("chat_template")
    if isinstance(template, list):  # of several templates, e.g. one for tools
        template = next(
            (item.get("template") for item in template if isinstance(item, dict) and item.get("name") == "default"),
            None,
        )
    if not isinstance(template, str) or not template:
        raise BadModelConfig(
            f"{prefix}: expected '{folder}/chat_template.jinja', or 'chat_template' in '{folder}/tokenizer_config.json'"
        )
    tokens: dict[str, str] = {}
    for key, value in config.items():
        token = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(token, str):
            tokens[key] = token
    added = config.get("added_tokens_decoder")
    if not isinstance(added, dict):
        added = dict(enumerate(_read_json(prefix, model_dir, f"{folder}/tokenizer.json").get("added_tokens") or ()))
    found = [item for item in added.values() if isinstance(item, dict) and item.get("special")]
    more = config.get("additional_special_tokens") or ()
    texts = {
        *tokens.values(),
        *_MARKER.findall(template),
        *(item.get("content") if isinstance(item, dict) else item for item in (*found, *more)),
    }
    # A single character would refuse ordinary text.
    special = sorted(text for text in texts if isinstance(text, str) and len(text) > 1)
    return ChatTemplate(template, tokens, tuple(special))


def _read_json(prefix: str, model_dir: Path, name: str) -> Mapping[str, Any]:
    """Return the object of a JSON file, an empty one if there is no such file."""
    text = _read(prefix, model_dir, name)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadModelConfig(f"{prefix}: '{name}' is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadModelConfig(f"{prefix}: '{name}' is not a JSON object")
    return value


def _read(prefix: str, model_dir: Path, name: str) -> str | None:
    """Return the text of a file, None if there is no such file."""
    if not (model_dir / check_relative(name, prefix)).exists():
        return None
    path = find_inside(model_dir, name, prefix)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadModelConfig(f"{prefix}: '{name}' cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise BadModelConfig(f"{prefix}: '{name}' is larger than {MAX_FILE_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadModelConfig(f"{prefix}: '{name}' is not UTF-8 text (byte {error.start})") from error
