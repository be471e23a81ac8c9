"""Replacement of a file in one step: the folder after success and after an error, and what readers find meanwhile."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from edge_server.repository.disk.replace_file import replace_file


def test_a_new_file_and_an_old_one_get_the_content_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "pins.json"
    for content in (b"first", memoryview(b"second")):
        replace_file(path, content)
        assert path.read_bytes() == bytes(content)
    assert os.listdir(tmp_path) == ["pins.json"]


def test_a_file_that_cannot_be_replaced_keeps_its_place_and_no_draft_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "pins.json"
    folder.mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(folder, b"content")
    assert os.listdir(tmp_path) == ["pins.json"]


def test_readers_find_whole_contents_only_while_two_threads_write(tmp_path: Path) -> None:
    path, contents = tmp_path / "state", [letter * 100_000 for letter in (b"a", b"b")]
    replace_file(path, contents[0])
    writers = [
        threading.Thread(
            target=lambda content=content: [replace_file(path, content, is_durable=False) for _ in range(200)]
        )
        for content in contents
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_bytes() in contents
    assert os.listdir(tmp_path) == ["state"]
