"""Reader of the small files that exporters lay beside a model or pack into it, such as config.json of Hugging Face.

Their texts complete the metadata of the model's file, each under its file name; those packed into a TFLite file, which
may end with a zip archive, under "packed/NAME", and its own metadata as JSON under "tflite_metadata".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edge_server.backends.base import MAX_METADATA_TEXT
from edge_server.core.model_spec import ModelFile
from edge_server.errors import BadModelConfig
from edge_server.repository.safe_paths import find_inside

FILE_NAMES = ("metadata.yaml", "config.json", "preprocessor_config.json", "infer_cfg.yml", "inference.yml")

MAX_PACKED_FILES = 16
_MAX_DIRECTORY_BYTES = 1 << 16
_END_OF_ZIP = b"PK\x05\x06"


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
    if file.path.suffix == ".tflite":
        found |= {f"packed/{name}": text for name, text in _read_packed(file.path).items()}
        from edge_server.repository.tflite_metadata import read_tflite_metadata

        described = read_tflite_metadata(file.path)
        if described is not None:
            found["tflite_metadata"] = described
    return found


def _read_text(model_dir: Path, name: str) -> str | None:
    try:
        with find_inside(model_dir, name, "metadata").open("rb") as file:
            content = file.read(MAX_METADATA_TEXT + 1)
    except (BadModelConfig, OSError):
        return None
    return _decode(content)


def _decode(content: bytes) -> str | None:
    try:
        return content.decode() if len(content) <= MAX_METADATA_TEXT else None
    except UnicodeDecodeError:
        return None


def _read_packed(path: Path) -> Mapping[str, str]:
    """Return the files of the zip archive at the end of a file, or nothing if there is none of a small directory."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 65557))
        end = file.read()
    at = end.rfind(_END_OF_ZIP)
    if at < 0 or int.from_bytes(end[at + 12 : at + 16], "little") > _MAX_DIRECTORY_BYTES:
        return {}
    import zipfile
    import zlib

    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist()[:MAX_PACKED_FILES]:
                if info.file_size <= MAX_METADATA_TEXT:
                    with archive.open(info) as packed:
                        text = _decode(packed.read(MAX_METADATA_TEXT + 1))
                    if text is not None:
                        found[info.filename] = text
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, NotImplementedError, RuntimeError, EOFError):
        return {}
    return found
