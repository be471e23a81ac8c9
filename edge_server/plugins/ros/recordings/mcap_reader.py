"""Reader of MCAP files that may be damaged: what ROS 2 records, also if its machine lost power while it did.

Messages come in the order of their time, over all files of a recording. A file without an index, or whose end is
missing, is scanned; chunks that cannot be read are skipped and reported. All sizes in a file are checked before memory
is taken for them. The format: https://mcap.dev/spec.
"""

from __future__ import annotations

import heapq
import struct
import sys
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.messages.ros2_types import import_library

MAX_CHUNK_BYTES = 1 << 29
"""Largest chunk or message that is read, compressed or not. A picture of 8192 x 8192 in colour has 192 MiB."""

MAX_OPEN_BYTES = 1 << 29
"""Chunks whose times overlap are read together up to this size. Beyond it the order of messages is that of the file."""

_MAX_CHUNKS = 1 << 22
_MAX_NOTES = 100
_MAX_DEFINITION_BYTES = 1 << 20
_MAX_SUMMARY_BYTES = 1 << 30
_RUN_BYTES = 1 << 20
"""Messages outside of chunks are read in runs of this size."""

_MAGIC = b"\x89MCAP0\r\n"
_HEADER, _FOOTER, _SCHEMA, _CHANNEL, _MESSAGE, _CHUNK, _MESSAGE_INDEX, _CHUNK_INDEX = range(1, 9)
_STATISTICS, _DATA_END = 0x0B, 0x0F
_DEFINITIONS = (_SCHEMA, _CHANNEL)

_RECORD = struct.Struct("<BQ")
_MESSAGE_HEAD = struct.Struct("<HIQQ")
_CHUNK_HEAD = struct.Struct("<QQQI")
_FOOTER_SIZE = _RECORD.size + 20 + len(_MAGIC)
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class RecordedChannel(NamedTuple):
    """A publisher's topic in one file."""

    topic: str
    type_name: str
    encoding: str


class RecordedMessage(NamedTuple):
    """A message in its serialization, and its time in nanoseconds of the recorder's clock."""

    time_ns: int
    channel: RecordedChannel
    data: memoryview


class _Chunk(NamedTuple):
    """Position of a record's content in a file. `channel_ids` None: not known. Without `is_chunk` the content is a run
    of message records that are in no chunk."""

    start_ns: int
    offset: int
    size: int
    channel_ids: frozenset[int] | None
    is_chunk: bool = True


class _DamagedError(Exception):
    """A part of a file cannot be read."""


class McapReader:
    """The files of one recording. Each is opened for a chunk at a time: a drive may have more files than a process may.

    Raises InvalidRequest if none of them can be read as an MCAP file of ROS 2.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.damage: list[str] = []
        """What is missing, a sentence for each place. Grows while messages are read."""
        self._skipped: set[tuple[Path, int]] = set()
        self._files: list[_McapFile] = []
        for path in paths:
            try:
                self._files.append(_McapFile(path, self._note_damage))
            except InvalidRequest as error:
                if len(paths) == 1:
                    raise
                self._note_damage(error.message)
                if path.stat().st_size:  # an empty file is the last one of a recorder that was killed
                    self._skipped.add((path, 0))
        if not self._files:
            raise InvalidRequest("; ".join(self.damage))

    @property
    def skipped_count(self) -> int:
        """Files and chunks that could not be read so far, but for the missing ends of files."""
        return len(self._skipped)

    def channels(self) -> Counter[RecordedChannel]:
        """Return the channels with their numbers of messages."""
        found: Counter[RecordedChannel] = Counter()
        for file in self._files:
            for number, channel in file.channels.items():
                found[channel] += file.counts[number]
        return found

    def close(self) -> None:
        """Do nothing: no file is open between two chunks."""

    def messages(self, topics: Sequence[str]) -> Iterator[RecordedMessage]:
        """Yield the messages of some topics in the order of time."""
        waiting = deque(
            sorted(
                (
                    (chunk.start_ns, number, file, chunk)
                    for number, file in enumerate(self._files)
                    for chunk in file.chunks
                ),
                key=lambda entry: entry[:2],
            )
        )
        wanted = {id(file): file.numbers_of(topics) for file in self._files}
        opened: list[tuple[int, int, list[RecordedMessage], int]] = []
        opened_bytes = order = 0
        while waiting or opened:
            while waiting and (
                not opened or (waiting[0][0] <= opened[0][0] and opened_bytes + waiting[0][3].size <= MAX_OPEN_BYTES)
            ):
                _, _, file, chunk = waiting.popleft()
                numbers = wanted[id(file)]
                if chunk.channel_ids is not None and chunk.channel_ids.isdisjoint(numbers):
                    continue
                messages, size = self._read_chunk(file, chunk, numbers)
                if messages:
                    order += 1
                    opened_bytes += size
                    heapq.heappush(opened, (messages[-1].time_ns, order, messages, size))
            if opened:
                _, number, messages, size = opened[0]
                message = messages.pop()
                if messages:
                    heapq.heapreplace(opened, (messages[-1].time_ns, number, messages, size))
                else:
                    heapq.heappop(opened)
                    opened_bytes -= size
                yield message._replace(data=_plain(message.data))

    def _read_chunk(self, file: _McapFile, chunk: _Chunk, numbers: set[int]) -> tuple[list[RecordedMessage], int]:
        """Return messages of a chunk, the last one first, and the size of the memory that they share."""
        try:
            return file.read_messages(chunk, numbers)
        except _DamagedError as error:
            if chunk is not file.last_of_cut_file:
                self._skipped.add((file.path, chunk.offset))
            self._note_damage(f"{file.path.name}: the chunk at byte {chunk.offset} is skipped: {error}")
            return [], 0
        except OSError as error:
            raise file.make_error(error.strerror or str(error)) from error

    def _note_damage(self, text: str) -> None:
        if len(self.damage) < _MAX_NOTES and text not in self.damage:
            self.damage.append(text)


class _McapFile:
    """One file: its channels, and where its chunks are."""

    def __init__(self, path: Path, note_damage: Callable[[str], None]) -> None:
        self.path = path
        self.channels: dict[int, RecordedChannel] = {}
        self.counts: Counter[int] = Counter()
        self.chunks: list[_Chunk] = []
        self.last_of_cut_file: _Chunk | None = None
        self._schemas: dict[int, str] = {}
        self._file: BinaryIO
        try:
            with path.open("rb") as self._file:
                self._size = self._file.seek(0, 2)
                data_start = self._read_header()
                if not self._read_summary(data_start):
                    self.channels.clear()
                    self.counts.clear()
                    self.chunks.clear()
                    self._scan(data_start, note_damage)
        except OSError as error:
            raise self.make_error(error.strerror or str(error)) from error

    def make_error(self, reason: str) -> InvalidRequest:
        """Return the error of a file that cannot be read."""
        return InvalidRequest(f"recording '{self.path}' cannot be read: {reason}")

    def numbers_of(self, topics: Sequence[str]) -> set[int]:
        """Return the ids of the channels of some topics."""
        return {number for number, channel in self.channels.items() if channel.topic in topics}

    def read_messages(self, chunk: _Chunk, numbers: set[int]) -> tuple[list[RecordedMessage], int]:
        """Return a chunk's messages of some channels, the last one first, and the size of the memory that they share.

        Raises _DamagedError.
        """
        with self.path.open("rb") as self._file:
            data = self._read_records(chunk)
        found: list[RecordedMessage] = []
        for kind, content in _records(data):
            if kind == _MESSAGE and len(content) >= _MESSAGE_HEAD.size:
                number, _, time_ns, _ = _MESSAGE_HEAD.unpack_from(content)
                if number in numbers:
                    found.append(RecordedMessage(time_ns, self.channels[number], content[_MESSAGE_HEAD.size :]))
        found.sort(key=lambda message: message.time_ns)
        found.reverse()
        return found, len(data)

    def _read_header(self) -> int:
        """Check the file's beginning; return where its data begin."""
        begin = self._read_at(0, len(_MAGIC) + _RECORD.size)
        if begin[: len(_MAGIC)] != _MAGIC or len(begin) < len(_MAGIC) + _RECORD.size:
            raise self.make_error("it does not begin as an MCAP file" if begin else "it is empty")
        kind, size = _RECORD.unpack_from(begin, len(_MAGIC))
        content = self._read_at(len(begin), min(size, _MAX_DEFINITION_BYTES))
        try:
            profile = _Fields(memoryview(content)).text() if kind == _HEADER else ""
        except _DamagedError:
            profile = ""
        if kind != _HEADER or size > _MAX_DEFINITION_BYTES or len(content) < size:
            raise self.make_error("its header is damaged")
        if profile not in ("", "ros2"):
            raise self.make_error(f"expected the MCAP profile 'ros2', given {profile[:40]!r}")
        return len(begin) + int(size)

    def _read_summary(self, data_start: int) -> bool:
        """Read the index at the end of the file. Return False if there is none or it cannot be used."""
        footer = self._read_at(max(self._size - _FOOTER_SIZE, 0), _FOOTER_SIZE)
        if len(footer) < _FOOTER_SIZE or footer[-len(_MAGIC) :] != _MAGIC:
            return False
        kind, _, start = struct.unpack_from("<BQQ", footer)
        if (
            kind != _FOOTER
            or not data_start <= start <= self._size - _FOOTER_SIZE
            or self._size - start > _MAX_SUMMARY_BYTES
        ):
            return False
        total = -1
        try:
            for kind, content in _records(memoryview(self._read_at(start, self._size - start - len(_MAGIC)))):
                if kind in _DEFINITIONS:
                    self._add_definition(kind, content)
                elif kind == _CHUNK_INDEX:
                    self._add_chunk_index(_Fields(content))
                elif kind == _STATISTICS:
                    total, counts = struct.unpack_from("<Q", content)[0], _Fields(content[42:])
                    self.counts.update(dict(struct.iter_unpack("<HQ", counts.block())))
        except (_DamagedError, struct.error):
            return False
        # Without counts or chunks only a scan finds the messages.
        return total == 0 or bool(total > 0 and self.chunks and self.counts and self.channels)

    def _add_chunk_index(self, fields: _Fields) -> None:
        start_ns, _, offset, size = fields.numbers("<QQQQ")
        ids = frozenset(number for number, _ in struct.iter_unpack("<HQ", fields.block()))
        if offset + size > self._size or size < _RECORD.size:
            raise _DamagedError("a chunk is not in the file")
        self._add_chunk(_Chunk(start_ns, offset + _RECORD.size, size - _RECORD.size, ids))

    def _add_chunk(self, chunk: _Chunk) -> None:
        if len(self.chunks) == _MAX_CHUNKS:
            raise self.make_error(f"expected at most {_MAX_CHUNKS} chunks")
        self.chunks.append(chunk)

    def _scan(self, data_start: int, note_damage: Callable[[str], None]) -> None:
        """Find the chunks and channels from the beginning of the file."""
        at, run_start, run_ns, run_ids = data_start, 0, 0, set[int]()
        indexed: Counter[int] = Counter()
        while True:
            head = self._read_at(at, _RECORD.size + _CHUNK_HEAD.size)
            kind, size = _RECORD.unpack_from(head) if len(head) >= _RECORD.size else (0, 0)
            content_at = at + _RECORD.size
            is_cut = kind == 0 or content_at + size > self._size
            if run_start and (kind != _MESSAGE or is_cut or at - run_start > _RUN_BYTES):
                self._add_chunk(_Chunk(run_ns, run_start, at - run_start, frozenset(run_ids), is_chunk=False))
                run_start = 0
            if is_cut:
                if kind == _CHUNK and len(head) == _RECORD.size + _CHUNK_HEAD.size:
                    start_ns = _CHUNK_HEAD.unpack_from(head, _RECORD.size)[0]
                    self._add_chunk(_Chunk(start_ns, content_at, self._size - content_at, None))
                note_damage(
                    f"{self.path.name} has no end, as if its recorder was killed: it is read to byte {at}, and as far "
                    f"as possible in the last {self._size - at} byte(s)"
                )
                break
            if kind in (_CHUNK, _DATA_END, _FOOTER) and indexed:
                # Only now: the index of a chunk has a record for each channel, and the end of the file may cut them.
                self.chunks[-1] = self.chunks[-1]._replace(channel_ids=frozenset(indexed))
                self.counts.update(indexed)
                indexed = Counter()
            if kind in (_DATA_END, _FOOTER):
                break
            if kind == _MESSAGE:
                if size >= _MESSAGE_HEAD.size:
                    number, _, time_ns, _ = _MESSAGE_HEAD.unpack_from(head, _RECORD.size)
                    if not run_start:
                        run_start, run_ns, run_ids = at, time_ns, set()
                    run_ns = min(run_ns, time_ns)
                    run_ids.add(number)
                    self.counts[number] += 1
            elif kind == _CHUNK:
                start_ns = _CHUNK_HEAD.unpack_from(head, _RECORD.size)[0] if size >= _CHUNK_HEAD.size else 0
                self._add_chunk(_Chunk(start_ns, content_at, size, None))
            elif kind == _MESSAGE_INDEX and self.chunks and self.chunks[-1].is_chunk and size >= 6:
                number, length = struct.unpack_from("<HI", head, _RECORD.size)
                if length:
                    indexed[number] += length // 16
            elif kind in _DEFINITIONS and size <= _MAX_DEFINITION_BYTES:
                self._add_definition(kind, memoryview(self._read_at(content_at, size)))
            at = content_at + size
        if is_cut and self.chunks:
            self.last_of_cut_file = self.chunks[-1]
        self._read_definitions_in_chunks()

    def _read_definitions_in_chunks(self) -> None:
        """Read the chunks of which it is not known what they hold, and those with channels that are not defined yet."""
        for chunk in self.chunks:
            if not chunk.is_chunk or (chunk.channel_ids is not None and chunk.channel_ids <= self.channels.keys()):
                continue
            try:
                for kind, content in _records(self._read_records(chunk)):
                    if kind in _DEFINITIONS:
                        self._add_definition(kind, content)
                    elif kind == _MESSAGE and chunk.channel_ids is None and len(content) >= _MESSAGE_HEAD.size:
                        self.counts[_MESSAGE_HEAD.unpack_from(content)[0]] += 1
            except _DamagedError:
                continue  # reported when its messages are read

    def _add_definition(self, kind: int, content: memoryview) -> None:
        """Add a schema or a channel. Damaged ones are ignored: their messages belong to no topic."""
        try:
            fields = _Fields(content)
            (number,) = fields.numbers("<H")
            if kind == _SCHEMA:
                self._schemas[number] = fields.text()
            else:
                (schema,) = fields.numbers("<H")
                channel = RecordedChannel(fields.text(), self._schemas.get(schema, ""), fields.text())
                if "".join(channel).isprintable():  # names are shown on terminals
                    self.channels[number] = channel
        except _DamagedError:
            return

    def _read_records(self, chunk: _Chunk) -> memoryview:
        """Return the records of a chunk. Of the last chunk of a file without an end, those that are there."""
        if chunk.size > MAX_CHUNK_BYTES:
            raise _DamagedError(f"expected at most {MAX_CHUNK_BYTES} bytes, given {chunk.size}")
        content = self._read_at(chunk.offset, chunk.size)
        if len(content) < chunk.size:
            raise _DamagedError("the file became shorter")
        if not chunk.is_chunk:
            return memoryview(content)
        fields = _Fields(memoryview(content))
        _, _, size, checksum = fields.numbers("<QQQI")
        compression = fields.text()
        (stored,) = fields.numbers("<Q")
        packed = fields.rest()
        if size > MAX_CHUNK_BYTES:
            raise _DamagedError(f"expected at most {MAX_CHUNK_BYTES} bytes, given {size}")
        is_whole = len(packed) >= stored
        records = _decompress(packed[:stored], compression, size)
        if is_whole and len(records) != size:
            raise _DamagedError(f"expected {size} bytes, given {len(records)} or more")
        if is_whole and checksum and zlib.crc32(records) != checksum:
            raise _DamagedError("its checksum differs")
        return records

    def _read_at(self, offset: int, size: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(size)


class _Fields:
    """Cursor in the content of a record. Its methods raise _DamagedError where the content ends too early."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._at = 0

    def numbers(self, layout: str) -> tuple[int, ...]:
        try:
            found = struct.unpack_from(layout, self._content, self._at)
        except struct.error:
            raise _DamagedError("a record is too short") from None
        self._at += struct.calcsize(layout)
        return found

    def block(self) -> memoryview:
        (size,) = self.numbers("<I")
        found = self._content[self._at : self._at + size]
        if len(found) < size:
            raise _DamagedError("a record is too short")
        self._at += size
        return found

    def text(self) -> str:
        try:
            return str(self.block(), "utf-8")
        except UnicodeDecodeError:
            raise _DamagedError("a name is not UTF-8") from None

    def rest(self) -> memoryview:
        return self._content[self._at :]


def _records(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield opcode and content of each record. An incomplete one at the end is ignored."""
    at = 0
    while at + _RECORD.size <= len(data):
        kind, size = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        if at + size > len(data):
            return
        yield kind, data[at : at + size]
        at += size


def _plain(data: memoryview) -> memoryview:
    """Return a message, decompressed if its recorder compressed each message (rosbag2's compression mode `message`).

    A message in CDR begins with a zero byte. What cannot be decompressed is returned as it is.
    """
    if data[:4] != _ZSTD_MAGIC:
        return data
    try:
        return _decompress(data, "zstd", MAX_CHUNK_BYTES)
    except _DamagedError:
        return data


def _decompress(data: memoryview, compression: str, max_size: int) -> memoryview:
    """Return the decompressed data, and at most one byte more than `max_size`. Of incomplete data, what is there."""
    if not compression:
        return data
    # Both packages are requirements of rosbags.
    errors: tuple[type[Exception], ...]
    if compression == "lz4":
        decompressor = import_library("lz4.frame").LZ4FrameDecompressor()
        errors = (RuntimeError, EOFError)
    elif compression == "zstd":
        zstd = import_library("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
        decompressor, errors = zstd.ZstdDecompressor(), (zstd.ZstdError, EOFError)
    else:
        raise _DamagedError(f"its compression '{compression[:40]}' is not known")
    try:
        return memoryview(decompressor.decompress(data, max_length=max_size + 1))
    except errors as error:
        raise _DamagedError(f"{compression}: {error}") from error
