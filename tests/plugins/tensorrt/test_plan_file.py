"""Heads of plan files: metadata of Ultralytics are cut off, and an engine without them is left whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_server.backends.base import MAX_METADATA_TEXT
from edge_server.plugins.tensorrt.plan_file import read_plan

ENGINE = b"ftrt" + bytes(range(256))


def with_length(content: bytes, length: int | None = None) -> bytes:
    return (len(content) if length is None else length).to_bytes(4, "little") + content


def test_metadata_before_an_engine_are_cut_off(tmp_path: Path) -> None:
    text = json.dumps({"task": "detect", "names": {"0": "caf\u00e9"}})
    (tmp_path / "plan").write_bytes(with_length(text.encode()) + ENGINE)
    assert read_plan(tmp_path / "plan") == (ENGINE, text)


@pytest.mark.parametrize(
    "content",
    [
        ENGINE, b"", b"ft", with_length(b"{}", 1000), with_length(b"[1]"), with_length(b"\xff{}"), with_length(b"{"),
        with_length(b""), with_length(b"[" * 100_000),
        with_length(json.dumps({"a": "a" * MAX_METADATA_TEXT}).encode()),
    ],
)  # fmt: skip
def test_a_file_without_metadata_is_an_engine_as_a_whole(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan").write_bytes(content)
    assert read_plan(tmp_path / "plan") == (content, "")
