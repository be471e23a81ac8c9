"""Recordings of topics: rosbag2 (MCAP or SQLite) and ROS 1 bags read, MCAP written, by rosbags and without ROS."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from edge_server.core.frame import Frame
from edge_server.errors import InvalidRequest, NotFound
from edge_server.ros.message_conversion import MessageKind, OutgoingMessage, frame_of, kind_of
from edge_server.ros.ros2_types import MessageTypes, import_library

_IMAGES = (MessageKind.IMAGE, MessageKind.COMPRESSED_IMAGE)
_ROSBAG2_VERSION = 9


@dataclass(frozen=True, slots=True)
class RecordedFrame:
    """A picture and when it was recorded, in nanoseconds of the recorder's clock."""

    recorded_ns: int
    frame: Frame


class TopicRecording:
    """A recording opened for reading, to be used in a `with`.

    `path`: a .mcap, .db3 or .bag file, or a rosbag2 folder. Raises NotFound when there is none, InvalidRequest when it
    cannot be read, Unsupported without rosbags.
    """

    def __init__(self, path: Path, types: MessageTypes) -> None:
        reading: Any = import_library("rosbags.highlevel")
        self._errors = (reading.anyreader.AnyReaderError, *reading.anyreader.ReaderErrors)
        self._path = path
        if not path.exists():
            raise NotFound(f"there is no recording '{path}'")
        with self._told():
            self._reader: Any = reading.AnyReader([path], default_typestore=types.store)

    def __enter__(self) -> TopicRecording:
        with self._told():
            self._reader.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()

    def image_topics(self) -> dict[str, int]:
        """Return the topics of Image or CompressedImage, and how many messages each has."""
        found: dict[str, int] = {}
        for connection in self._reader.connections:
            if kind_of(connection.msgtype) in _IMAGES:
                found[connection.topic] = found.get(connection.topic, 0) + int(connection.msgcount)
        return found

    def choose(self, topic: str = "") -> tuple[str, int]:
        """Return the topic to read and its count: the one named, or the only one. Raises NotFound, InvalidRequest."""
        topics = self.image_topics()
        listed = ", ".join(sorted(topics)) or "none"
        if topic:
            name = topic if topic in topics else f"/{topic}"
            if name not in topics:
                raise NotFound(f"'{self._path}' has no images on topic '{topic}'; topics with images: {listed}")
            return name, topics[name]
        if len(topics) != 1:
            raise InvalidRequest(f"'{self._path}' {self._why_none_is_chosen(topics)}")
        return next(iter(topics.items()))

    def _why_none_is_chosen(self, topics: dict[str, int]) -> str:
        if topics:
            return f"has {len(topics)} topics of images: name one of {', '.join(sorted(topics))}"
        others = sorted({f"{one.topic} ({one.msgtype})" for one in self._reader.connections})
        return f"has no topic of sensor_msgs Image or CompressedImage; it has {', '.join(others) or 'no topic at all'}"

    def frames(self, topic: str) -> Iterator[RecordedFrame]:
        """Yield the pictures of a topic as they were recorded, numbered from 1 in `seq`. Raises InvalidRequest."""
        connections = [one for one in self._reader.connections if one.topic == topic and kind_of(one.msgtype)]
        seq = 0
        with self._told():
            for connection, recorded_ns, raw in self._reader.messages(connections=connections):
                seq += 1
                message = self._reader.deserialize(memoryview(raw), connection.msgtype)
                yield RecordedFrame(recorded_ns, frame_of(message, seq=seq))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise InvalidRequest(f"recording '{self._path}' cannot be read: {error}") from error
        except OSError as error:
            raise InvalidRequest(f"recording '{self._path}' cannot be read: {error.strerror or error}") from error


class RecordingWriter:
    """A new rosbag2 recording, to be used in a `with`; it appears under its name once it is complete.

    `path` ending in .mcap becomes that one file, any other a folder with its metadata.yaml beside the MCAP. What
    stands there is never overwritten: InvalidRequest.
    """

    def __init__(self, path: Path, types: MessageTypes) -> None:
        if path.exists():
            raise InvalidRequest(f"'{path}' exists already and is not overwritten")
        self._path = path
        self._types = types
        self._module: Any = import_library("rosbags.rosbag2")
        self._workplace = path.with_name(f".{path.name}.unfinished")
        self._folder = self._workplace / path.name.removesuffix(".mcap")
        self._connections: dict[str, Any] = {}
        self.counts: dict[str, int] = {}

    def __enter__(self) -> RecordingWriter:
        shutil.rmtree(self._workplace, ignore_errors=True)
        self._writer: Any = self._module.Writer(
            self._folder, version=_ROSBAG2_VERSION, storage_plugin=self._module.StoragePlugin.MCAP
        )
        try:
            self._writer.open()
        except OSError as error:
            raise self._unwritable(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._writer.abort()
            shutil.rmtree(self._workplace, ignore_errors=True)
            return
        try:
            self._writer.close()
            finished = next(self._folder.glob("*.mcap")) if self._path.suffix == ".mcap" else self._folder
            finished.rename(self._path)
        except OSError as fault:
            raise self._unwritable(fault) from fault
        finally:
            shutil.rmtree(self._workplace, ignore_errors=True)

    def _unwritable(self, error: OSError) -> InvalidRequest:
        return InvalidRequest(f"'{self._path}' cannot be written: {error.strerror or error}")

    def write(self, topic: str, message: OutgoingMessage, recorded_ns: int) -> None:
        """Write a message under the time of the frame it belongs to. Raises InvalidRequest where the disk is full."""
        try:
            if topic not in self._connections:
                self._connections[topic] = self._writer.add_connection(
                    topic, message.kind.value, typestore=self._types.store
                )
            self._writer.write(self._connections[topic], recorded_ns, self._types.encode(message))
        except OSError as error:
            raise self._unwritable(error) from error
        self.counts[topic] = self.counts.get(topic, 0) + 1
