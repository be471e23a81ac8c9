"""Metadata within TensorFlow Lite files, which the library flatbuffers wrote: found, and damaged in every byte."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import flatbuffers
import pytest

from edge_server.backends.base import MAX_METADATA_TEXT
from edge_server.backends.tflite_metadata import MAX_PACKED_FILES, describe_tensors, read_tflite_metadata

Fields = dict[int, Any]
"""A table: number of a field -> text, bytes, table, list of tables, or (name of a type, number or list of numbers)."""
SIZES = {"Float32": 4, "Int32": 4, "Int64": 8}


def pack(table: Fields, identifier: bytes) -> bytes:
    builder = flatbuffers.Builder(1024)
    builder.Finish(add_table(builder, table), identifier)
    return bytes(builder.Output())


def add_table(builder: flatbuffers.Builder, table: Fields) -> int:
    found = {field: add_value(builder, value) for field, value in table.items()}
    builder.StartObject(max(table, default=-1) + 1)
    for field, position in found.items():
        if position is None:
            kind, number = table[field]
            getattr(builder, f"Prepend{kind}Slot")(field, number, 0)
        else:
            builder.PrependUOffsetTRelativeSlot(field, position, 0)
    return int(builder.EndObject())


def add_value(builder: flatbuffers.Builder, value: Any) -> int | None:
    """Return the position of a value, None for a number, which stands in the table itself."""
    if isinstance(value, str):
        return int(builder.CreateString(value))
    if isinstance(value, bytes):
        return int(builder.CreateByteVector(value))
    if isinstance(value, dict):
        return add_table(builder, value)
    if isinstance(value, list):
        kind, items = "UOffsetTRelative", [add_table(builder, item) for item in value]
    else:
        kind, items = value
        if not isinstance(items, list):
            return None
    size = SIZES.get(kind, 4)
    builder.StartVector(size, len(items), size)
    for item in reversed(items):
        getattr(builder, f"Prepend{kind}")(item)
    return int(builder.EndVector())


AXIS_LABELS = ("Int8", 2)
PICTURE = {0: ("Uint8", 2), 1: {0: ("Int8", 1)}}
NORMALIZATION = {0: ("Uint8", 1), 1: {0: ("Float32", [127.5]), 1: ("Float32", [64.0, 32.0, 16.0])}}
INPUT = {0: "image", 3: PICTURE, 4: [{0: ("Uint8", 3), 1: {}}, NORMALIZATION]}
FILES = [{0: "de.txt", 2: AXIS_LABELS, 3: "de"}, {0: "about"}, {0: "labels.txt", 2: AXIS_LABELS}]
OUTPUT = {3: {0: ("Uint8", 1), 1: {}}, 6: FILES}
METADATA = pack({0: "a classifier", 3: [{2: [INPUT], 3: [OUTPUT]}]}, b"M001")


def model(metadata: bytes = METADATA, name: str = "TFLITE_METADATA", index: int = 2) -> bytes:
    quantization = {2: ("Float32", [0.25]), 3: ("Int64", [-3])}
    graph = {
        0: [{3: "weights"}, {3: "scores", 1: ("Int8", 3), 4: quantization}, {3: "pixels", 1: ("Int8", 0)}],
        1: ("Int32", [2]),
        2: ("Int32", [1]),
    }
    listed = [{0: "other", 1: ("Uint32", 1)}, {0: name, 1: ("Uint32", index)}]
    return pack({2: [graph], 4: [{}, {}, {0: metadata}], 6: listed}, b"TFL3")


def read(path: Path, content: bytes) -> Any:
    path.write_bytes(content)
    found = describe_tensors(path)
    return None if found is None else json.loads(found)


def test_inputs_and_outputs_are_described(tmp_path: Path) -> None:
    picture = {
        "name": "pixels", "type": "FP32", "content": "image", "color": "rgb", "mean": [127.5], "std": [64, 32, 16]
    }  # fmt: skip
    scores = {
        "name": "scores", "type": "UINT8", "scale": 0.25, "zero_point": -3, "axis_labels": "labels.txt"
    }  # fmt: skip
    assert read(tmp_path / "file", model()) == {"inputs": [picture], "outputs": [scores]}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"TFL3", b"\0\0\0\0TFL3", b"\xff\xff\xff\xffTFL3" + b"\xff" * 64, pack({}, b"TFL3"), model(b""),
        model(name="TFLITE"), model(index=3), model(index=1), model(pack({}, b"M001")), model(METADATA[:40]),
        model(METADATA.replace(b"M001", b"M002")),
    ],
)  # fmt: skip
def test_a_file_without_whole_metadata_gives_nothing(tmp_path: Path, content: bytes) -> None:
    assert read(tmp_path / "file", content) is None


def test_lists_are_bounded(tmp_path: Path) -> None:
    many = pack({3: [{2: [INPUT] * 65, 3: [OUTPUT]}]}, b"M001")
    assert read(tmp_path / "file", model(many)) is None
    long_name = pack({3: [{2: [INPUT], 3: [{6: [{0: "a" * 1025, 2: AXIS_LABELS}]}]}]}, b"M001")
    assert read(tmp_path / "file", model(long_name)) is None


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.full)])
def test_every_changed_byte_and_every_cut_gives_a_description_or_nothing(tmp_path: Path, step: int) -> None:
    whole = model()
    results = []
    for position in range(0, len(whole), step):
        for value in (0, 0x7F, 0xFF, whole[position] ^ 4):
            results.append(read(tmp_path / "file", whole[:position] + bytes([value]) + whole[position + 1 :]))
        results.append(read(tmp_path / "file", whole[:position]))
    assert None in results
    assert all(set(found) == {"inputs", "outputs"} for found in results if found is not None)


@pytest.fixture
def tflite(tmp_path: Path) -> Path:
    path = tmp_path / "model.tflite"
    path.write_bytes(b"TFL3 network")
    return path


def test_texts_packed_into_a_tflite_file_are_found(tflite: Path) -> None:
    with zipfile.ZipFile(tflite, "a") as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("labels.txt", "a\nb", zipfile.ZIP_DEFLATED)
        archive.writestr("bomb", b"a" * (MAX_METADATA_TEXT + 1), zipfile.ZIP_DEFLATED)
    assert read_tflite_metadata(tflite) == {"packed/metadata.json": "{}", "packed/labels.txt": "a\nb"}


def test_only_the_first_packed_files_are_read(tflite: Path) -> None:
    with zipfile.ZipFile(tflite, "a") as archive:
        for index in range(MAX_PACKED_FILES + 5):
            archive.writestr(f"f{index}", "text")
    assert len(read_tflite_metadata(tflite)) == MAX_PACKED_FILES


def test_the_tensors_that_a_tflite_file_describes_are_found(tflite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_server.backends.tflite_metadata.describe_tensors", lambda path: path.suffix)
    assert read_tflite_metadata(tflite) == {"tflite_metadata": ".tflite"}


@pytest.mark.parametrize("content", [b"PK\x05\x06", b"PK\x05\x06" + b"\xff" * 18, b"PK\x05\x06" + b"\0" * 18, b""])
def test_a_damaged_archive_gives_nothing(tflite: Path, content: bytes) -> None:
    tflite.write_bytes(b"TFL3 network" + content)
    assert read_tflite_metadata(tflite) == {}


def test_a_large_directory_of_an_archive_is_not_read(tflite: Path) -> None:
    with zipfile.ZipFile(tflite, "a") as archive:
        for index in range(1000):
            archive.writestr(f"file{index:060}", "")
    assert read_tflite_metadata(tflite) == {}
