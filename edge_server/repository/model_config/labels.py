"""Reader of label files: one class name per line, line number = class index (Triton's label_filename)."""

from __future__ import annotations

from pathlib import Path

from edge_server.errors import BadModelConfig
from edge_server.repository.disk.safe_paths import find_inside

MAX_LABEL_BYTES = 16 << 20


def read_labels(model: str, output: str, model_dir: Path, file_name: str) -> tuple[str, ...]:
    """Return the labels of one output. An empty line is an empty label; the last line may lack its line feed.

    Raises BadModelConfig if the file is absent, lies outside `model_dir`, is larger than MAX_LABEL_BYTES, or is not
    UTF-8.
    """
    prefix = f"model '{model}': label_filename of output '{output}'"
    path = find_inside(model_dir, file_name, prefix)
    try:
        if not path.is_file():
            raise BadModelConfig(f"{prefix}: '{file_name}' is not a file")
        with path.open("rb") as file:
            content = file.read(MAX_LABEL_BYTES + 1)
    except OSError as error:
        raise BadModelConfig(f"{prefix}: '{file_name}' cannot be read: {error.strerror}") from error
    if len(content) > MAX_LABEL_BYTES:
        raise BadModelConfig(f"{prefix}: '{file_name}' is larger than {MAX_LABEL_BYTES} bytes")
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise BadModelConfig(f"{prefix}: '{file_name}' is not UTF-8 text (byte {error.start})") from error
    if lines[-1] == "":
        lines.pop()
    return tuple(line.removesuffix("\r") for line in lines)
