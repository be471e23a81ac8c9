"""MCAP recordings. Only InvalidRequest leaves the reader, and what a file says of its size takes no memory."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

from stubs import new_folder, result_of

from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.recordings import mcap_reader
from edge_server.plugins.ros.recordings.mcap_reader import McapReader

_PATH = new_folder("mcap") / "drive.mcap"
_MAX_BYTES = 1 << 24

# The fuzzer's process has 1 GiB: a bomb of the real bounds would end it.
mcap_reader.MAX_CHUNK_BYTES = mcap_reader.MAX_OPEN_BYTES = _MAX_BYTES


def _block(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _record(kind: int, content: bytes) -> bytes:
    return struct.pack("<BQ", kind, len(content)) + content


def _message(time_ns: int) -> bytes:
    return _record(5, struct.pack("<HIQQ", 1, 0, time_ns, time_ns) + b"\0\1\0\0data")


_BEGIN = b"\x89MCAP0\r\n" + _record(1, _block(b"ros2") + _block(b""))
_DEFINITIONS = _record(3, struct.pack("<H", 1) + _block(b"a/msg/B") + _block(b"ros2msg") + _block(b"int8 x"))
_DEFINITIONS += _record(4, struct.pack("<HH", 1, 1) + _block(b"/a") + _block(b"cdr") + _block(b""))


def _chunk(records: bytes, compression: bytes, packed: bytes) -> bytes:
    sizes = struct.pack("<QQQI", 1, 9, len(records), zlib.crc32(records)) + _block(compression)
    index = struct.pack("<H", 1) + _block(struct.pack("<QQ", 1, 0))
    return _record(6, sizes + struct.pack("<Q", len(packed)) + packed) + _record(7, index)


def seeds() -> Iterable[bytes]:
    import lz4.frame

    zstd = mcap_reader.import_library("backports.zstd")
    records = _DEFINITIONS + _message(9) + _message(1)
    end = _record(0x0F, struct.pack("<I", 0))
    yield _BEGIN + _DEFINITIONS + _message(1) + _message(2) + end
    for compression, packed in (
        (b"", records),
        (b"zstd", zstd.compress(records)),
        (b"lz4", lz4.frame.compress(records)),
        (b"zstd", zstd.compress(bytes(_MAX_BYTES * 4))),
    ):
        data = _BEGIN + _chunk(records, compression, packed)
        yield data  # without an end
        chunk = struct.pack("<QQQQ", 1, 9, len(_BEGIN), len(data) - len(_BEGIN) - 31)
        chunk += _block(struct.pack("<HQ", 1, len(data) - 31)) + struct.pack("<Q", 31) + _block(compression)
        chunk += struct.pack("<QQ", len(packed), len(records))
        counts = struct.pack("<QHIIIIQQ", 2, 1, 1, 0, 0, 1, 1, 9) + _block(struct.pack("<HQ", 1, 2))
        summary = _DEFINITIONS + _record(8, chunk) + _record(0x0B, counts)
        footer = _record(2, struct.pack("<QQI", len(data) + len(end), 0, 0))
        yield data + end + summary + footer + b"\x89MCAP0\r\n"


def check(data: bytes) -> None:
    _PATH.write_bytes(data)
    reader = result_of(lambda: McapReader([_PATH]), InvalidRequest)
    if not isinstance(reader, McapReader):
        return
    topics = [channel.topic for channel in reader.channels()]
    for message in reader.messages(topics):
        assert message.channel.topic in topics
        assert len(message.data) <= _MAX_BYTES + 1
    assert len(reader.damage) <= 100
