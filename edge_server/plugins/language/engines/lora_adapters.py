"""Folder of the LoRA adapters of a language model: `adapters/NAME.gguf` beside the model's file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from edge_server.plugins.language.engines.model_size import BadModelFile, read_gguf_metadata

FOLDER = "adapters"
PARAMETER = "lora_adapters"
"""Of the completed configuration: the names, for the APIs."""

MAX_ADAPTERS = 32
"""All are loaded with the model."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def find_adapters(model_file: Path) -> Mapping[str, Path]:
    """Return the files of the adapters by name, sorted. Raises BadModelFile."""
    folder = model_file.parent / FOLDER
    if not folder.is_dir():
        return {}
    files = sorted(file for file in folder.iterdir() if not file.name.startswith("."))
    if len(files) > MAX_ADAPTERS:
        raise BadModelFile(f"folder '{FOLDER}': expected at most {MAX_ADAPTERS} adapters, got {len(files)}")
    for file in files:
        title = f"'{FOLDER}/{file.name[:80]}'"
        if file.suffix != ".gguf":
            raise BadModelFile(f"{title}: expected a .gguf file, as llama.cpp's convert_lora_to_gguf.py writes")
        if file.stem == "latest" or _NAME.fullmatch(file.stem) is None:
            raise BadModelFile(
                f"{title}: expected a name of up to 64 letters, digits, '.', '_' and '-' that is not 'latest'"
            )
        try:
            kind = read_gguf_metadata(file).get("general.type")
        except BadModelFile as error:
            raise BadModelFile(f"{title}: {error}") from None
        if kind != "adapter":
            raise BadModelFile(f"{title}: expected general.type 'adapter', got {str(kind)[:40]!r}")
    return {file.stem: file for file in files}


def adapter_names(parameters: Mapping[str, str]) -> list[str]:
    """Return the names in the parameters of a completed configuration."""
    return [name for name in parameters.get(PARAMETER, "").split(",") if name]
