"""Reader of the small files that exporters lay beside a model, such as config.json of Hugging Face.

Their texts complete the metadata of the model's file, each under its file name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edge_server.backends.base import MAX_METADATA_TEXT
from edge_server.core.model_spec import ModelFile
from edge_server.errors import BadModelConfig
from edge_server.repository.disk.safe_paths import find_inside

FILE_NAMES = ("metadata.yaml", "config.json", "preprocessor_config.json", "infer_cfg.yml", "inference.yml")


def read_metadata_files(file: ModelFile) -> Mapping[str, str]:
    """Return the texts of the files of FILE_NAMES beside the model's file, else in its model folder.

    Files that are absent, larger than MAX_METADATA_TEXT bytes or not UTF-8 are omitted.
    """
    found = {}
    for name in FILE_NAMES:
        for folder in (file.path.parent, file.model_dir):
            if folder.is_relative_to(file.model_dir) and (folder / name).is_file():
                text = _read_text(file.model_dir, (folder / name).relative_to(file.model_dir).as_posix())
                if text is not None:
                    found[name] = text
                break
    return found


def _read_text(model_dir: Path, name: str) -> str | None:
    try:
        with find_inside(model_dir, name, "metadata").open("rb") as file:
            content = file.read(MAX_METADATA_TEXT + 1)
        return content.decode() if len(content) <= MAX_METADATA_TEXT else None
    except (BadModelConfig, OSError, UnicodeDecodeError):
        return None
