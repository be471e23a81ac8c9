"""hpack-test-case (in npm's package hpack) against the reader of header blocks: stories of blocks that share a table,
by eleven encoders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_server.http2.header_blocks import HeaderBlock, HeaderReader

pytestmark = pytest.mark.full

EXCEPTIONS = {
    "raw-data": "the fields alone, not encoded",
    "util": "programs",
    "hyper-hpack": "draft 8: a reference set, which RFC 7541 has not",
    "node-http2-protocol": "draft 5",
    "twitter-hpack": "draft 7",
}
"""Folders that are left out."""
_PSEUDO = {":method": "method", ":path": "path", ":scheme": "scheme", ":authority": "authority", ":status": "status"}


def check(block: HeaderBlock | None, fields: list[tuple[str, str]]) -> None:
    assert block is not None
    assert list(block.pairs) == [(name.encode(), value.encode()) for name, value in fields if name[0] != ":"]
    for name, value in fields:
        if name[0] == ":":
            assert getattr(block, _PSEUDO[name]) == value.encode()


def test_the_blocks_of_each_encoder_have_their_fields(suites: Path) -> None:
    folders = [path for path in sorted((suites / "hpack/test/hpack-test-case").iterdir()) if path.is_dir()]
    read = [path for path in folders if path.name not in EXCEPTIONS]
    assert len(read) == len(folders) - len(EXCEPTIONS) == 11
    count = 0
    for file in (file for folder in read for file in sorted(folder.glob("*.json"))):
        reader = HeaderReader(1 << 20)
        for case in json.loads(file.read_text())["cases"]:
            data = bytes.fromhex(case["wire"])
            block = reader.remembered.get(data) or reader.read(data)
            check(block, [pair for field in case["headers"] for pair in field.items()])
            count += 1
    assert count >= 36_990
