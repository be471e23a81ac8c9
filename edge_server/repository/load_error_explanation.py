"""Explanation of a failed load from the model's file, such as an HTML page named model.onnx, or a missing read
permission.

They are looked for after a load failed, to give the reason in place of a runtime's parser error.
"""

from __future__ import annotations

import codecs
import mmap
import os
import re
from pathlib import Path

from edge_server.core.model_spec import ModelFile
from edge_server.errors import LoadError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of a pointer, https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md."""

_MAX_FILES = 1000
_PAGES = (".html", ".htm", ".xhtml")
_KINDS = {".onnx": "an ONNX model", ".tflite": "a TensorFlow Lite model", ".gguf": "a GGUF model"}
"""Suffixes of binary files -> what they hold."""
_TFLITE_IDENTIFIER = b"TFL3"
"""file_identifier of https://github.com/tensorflow/tensorflow/blob/master/tensorflow/compiler/mlir/lite/schema/schema.fbs."""
_ONNX_FIRST_BYTES = bytes.fromhex("08 12 1a 22 28 32 3a 42 72 a2 ca d2")
"""First bytes of the tags of ModelProto's fields, https://github.com/onnx/onnx/blob/main/onnx/onnx.proto."""
_ZIPMAP = b'"\x06ZipMap'
"""NodeProto.op_type of the operator that makes a list of maps of a classifier's scores."""
_CONTROL_CHARACTERS = frozenset(range(32)) - frozenset(b"\t\n\v\f\r\x1b") | {127}


def explain_by_content(error: LoadError, file: ModelFile) -> LoadError | None:
    """Return the error for a file that cannot be a model's, None if there is none among the version's.

    The given reason is kept after that of a file beside the model file: it may be another one's fault.
    """
    others = []
    for folder, _, names in os.walk(file.version_dir):
        others += [Path(folder, name) for name in names]
        if len(others) >= _MAX_FILES:
            break
    for path in dict.fromkeys([file.path, *sorted(others)[:_MAX_FILES]]):
        try:
            problem = _describe(path)
        except OSError:
            continue  # the given error stands
        if problem:
            message = f"model '{file.model_dir.name}' version {file.version}, file '{path.name}' {problem}"
            # Files with one stem are one model, as model.xml and model.bin.
            return LoadError(message if path.stem == file.path.stem else f"{message}; {error.message}")
    return None


def describe_permission(path: Path, error: PermissionError) -> str:
    """Return why a file or folder "cannot be read by user ...", with its owner and mode if they can be known."""
    reason = f"cannot be read by user {os.geteuid()}, as which this server runs: {error.strerror}"
    try:
        found = path.stat()
    except PermissionError:
        return reason
    return f"{reason} (owner: user {found.st_uid}, mode {found.st_mode & 0o7777:04o})"


def _describe(path: Path) -> str:
    try:
        if not path.is_file():  # Opening a named pipe would wait for its writer.
            return ""
        with path.open("rb") as opened:
            head = opened.read(1024)
    except FileNotFoundError:
        return ""
    except PermissionError as error:
        return describe_permission(path, error)
    if not head and path.suffix in (".onnx", ".xml", ".bin"):
        return "is empty"
    if head.startswith(_LFS_POINTER):
        size = re.search(rb"^size (\d{1,20})$", head, re.MULTILINE)
        whole = f" of {int(size[1])} bytes" if size else ""
        return f"is a Git LFS pointer to the file{whole}, not the file itself: run 'git lfs pull' where it was cloned"
    if path.suffix not in _PAGES and re.match(rb"\s*(<!doctype html|<html)", head, re.IGNORECASE):
        return "is an HTML page: a download returned a web page in place of the file"
    if head and path.suffix in _KINDS and _is_text(head):
        return f"is text, not {_KINDS[path.suffix]}"
    if path.suffix == ".tflite" and head[4:8] != _TFLITE_IDENTIFIER:
        return f"is not a TensorFlow Lite file: expected 'TFL3' at byte 4, given {head[4:8]!r}"
    if path.suffix == ".onnx" and head[0] not in _ONNX_FIRST_BYTES:
        return f"is not an ONNX model: no field of one begins with the byte {head[0]:#04x}"
    return _describe_end(path)


def _describe_end(path: Path) -> str:
    """Return the problem found by reading the whole file: its end is missing, or an operator cannot be
    served."""
    if path.suffix == ".onnx":
        expected, given = _protobuf_end(path), path.stat().st_size
        if expected > given:
            return f"is cut short: it has {given} bytes, and its content ends at byte {expected} or later"
        if _contains(path, _ZIPMAP):
            return (
                "was exported with ZipMap, whose output requests cannot carry: export it with "
                'options={"zipmap": False} of skl2onnx\'s to_onnx'
            )
    if path.suffix == ".bin" and path.with_suffix(".xml").is_file():
        ends = re.findall(rb'offset="(\d{1,18})" size="(\d{1,18})"', path.with_suffix(".xml").read_bytes())
        expected, given = max((int(offset) + int(size) for offset, size in ends), default=0), path.stat().st_size
        if expected > given:
            return f"is cut short: it has {given} bytes, and '{path.stem}.xml' names {expected}"
    return ""


def _is_text(head: bytes) -> bool:
    """Return whether the first bytes of a file are those of a text, in UTF-8."""
    if not _CONTROL_CHARACTERS.isdisjoint(head):
        return False
    try:
        # The last character may go on behind the head.
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def _contains(path: Path, part: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(part) >= 0


def _protobuf_end(path: Path) -> int:
    """Return the byte at which the last top-level field ends, as far as the fields can be followed: a graph is one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        position = 0
        while position < size:
            tag, count = _varint(file.read(10))
            position += count
            file.seek(position)
            value, count = _varint(file.read(10))
            match tag & 7:
                case 0 if count:
                    position += count
                case 1:
                    position += 8
                case 2 if count:
                    position += count + value
                case 5:
                    position += 4
                case _:
                    return 0
            file.seek(position)
    return position


def _varint(data: bytes) -> tuple[int, int]:
    """Return a number and the bytes that it takes; 0 bytes if it does not end."""
    value = 0
    for index, byte in enumerate(data):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, index + 1
    return 0, 0
