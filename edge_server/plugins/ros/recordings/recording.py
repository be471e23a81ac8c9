"""Reader and writer of ROS recordings, without ROS: reads rosbag2 (MCAP or SQLite) and ROS 1 bags, writes MCAP."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from edge_server.errors import InvalidRequest, NotFound
from edge_server.plugins.ros.messages.message_conversion import MessageKind, OutgoingMessage, kind_of, make_frame
from edge_server.plugins.ros.messages.ros2_types import MessageTypes, import_library
from edge_server.protocol.frame_messages import Frame

_IMAGES = (MessageKind.IMAGE, MessageKind.COMPRESSED_IMAGE)
_ROSBAG2_VERSION = 9


@dataclass(frozen=True, slots=True)
class RecordedFrame:
    """An image and its time in the recording, in nanoseconds of the recorder's clock."""

    recorded_ns: int
    frame: Frame


class TopicRecording:
    """Reader of a recording; use it in a `with` statement.

    `path` is a .mcap, .db3 or .bag file, or a rosbag2 folder. Raises NotFound when it does not exist, InvalidRequest
    when it cannot be read, Unsupported without rosbags.
    """

    def __init__(self, path: Path, types: MessageTypes) -> None:
        reading: Any = import_library("rosbags.highlevel")
        self._errors = (reading.anyreader.AnyReaderError, *reading.anyreader.ReaderErrors)
        self._path = path
        if not path.exists():
            raise NotFound(f"there is no recording '{path}'")
        with self._translate_errors():
            self._reader: Any = reading.AnyReader([path], default_typestore=types.store)

    def __enter__(self) -> TopicRecording:
        with self._translate_errors():
            self._reader.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()

    def image_topics(self) -> dict[str, int]:
        """Return the topics of Image or CompressedImage with their numbers of messages."""
        found: dict[str, int] = {}
        for connection in self._reader.connections:
            if kind_of(connection.msgtype) in _IMAGES:
                found[connection.topic] = found.get(connection.topic, 0) + int(connection.msgcount)
        return found

    def choose_topic(self, topic: str = "") -> tuple[str, int]:
        """Return the named or the only image topic, and its number of messages. Raises NotFound, InvalidRequest."""
        topics = self.image_topics()
        listed = ", ".join(sorted(topics)) or "none"
        if topic:
            name = topic if topic in topics else f"/{topic}"
            if name not in topics:
                raise NotFound(f"'{self._path}' has no images on topic '{topic}'; topics with images: {listed}")
            return name, topics[name]
        if not topics:
            others = sorted({f"{one.topic} ({one.msgtype})" for one in self._reader.connections})
            raise InvalidRequest(
                f"'{self._path}' has no topic of sensor_msgs Image or CompressedImage; "
                f"it has {', '.join(others) or 'no topic at all'}"
            )
        if len(topics) > 1:
            raise InvalidRequest(f"'{self._path}' has {len(topics)} topics of images: name one of {listed}")
        return next(iter(topics.items()))

    def frames(self, topic: str) -> Iterator[RecordedFrame]:
        """Yield the images of a topic in the order of the recording, with `seq` from 1. Raises InvalidRequest."""
        connections = [one for one in self._reader.connections if one.topic == topic and kind_of(one.msgtype)]
        seq = 0
        with self._translate_errors():
            for connection, recorded_ns, raw in self._reader.messages(connections=connections):
                seq += 1
                message = self._reader.deserialize(memoryview(raw), connection.msgtype)
                yield RecordedFrame(recorded_ns, make_frame(message, seq=seq))

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise InvalidRequest(f"recording '{self._path}' cannot be read: {error}") from error
        except OSError as error:
            raise InvalidRequest(f"recording '{self._path}' cannot be read: {error.strerror or error}") from error


class RecordingWriter:
    """Writer of a rosbag2 recording; use it in a `with` statement. It gets its name when it is complete.

    A `path` that ends in .mcap becomes one file, any other path a folder with the MCAP file and its metadata.yaml.
    Raises InvalidRequest when the path exists.
    """

    def __init__(self, path: Path, types: MessageTypes) -> None:
        if path.exists():
            raise InvalidRequest(f"'{path}' exists already and is not overwritten")
        self._path = path
        self._types = types
        self._module: Any = import_library("rosbags.rosbag2")
        self._partial_folder = path.with_name(f".{path.name}.unfinished")
        self._folder = self._partial_folder / path.name.removesuffix(".mcap")
        self._connections: dict[str, Any] = {}
        self.counts: dict[str, int] = {}

    def __enter__(self) -> RecordingWriter:
        shutil.rmtree(self._partial_folder, ignore_errors=True)
        self._writer: Any = self._module.Writer(
            self._folder, version=_ROSBAG2_VERSION, storage_plugin=self._module.StoragePlugin.MCAP
        )
        try:
            self._writer.open()
        except OSError as error:
            raise self._write_error(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._writer.abort()
            shutil.rmtree(self._partial_folder, ignore_errors=True)
            return
        try:
            self._writer.close()
            finished = next(self._folder.glob("*.mcap")) if self._path.suffix == ".mcap" else self._folder
            finished.rename(self._path)
        except OSError as fault:
            raise self._write_error(fault) from fault
        finally:
            shutil.rmtree(self._partial_folder, ignore_errors=True)

    def _write_error(self, error: OSError) -> InvalidRequest:
        return InvalidRequest(f"'{self._path}' cannot be written: {error.strerror or error}")

    def write(self, topic: str, message: OutgoingMessage, recorded_ns: int) -> None:
        """Write a message with the time of its frame. Raises InvalidRequest for errors such as a full disk."""
        try:
            if topic not in self._connections:
                self._connections[topic] = self._writer.add_connection(
                    topic, message.kind.value, typestore=self._types.store
                )
            self._writer.write(self._connections[topic], recorded_ns, self._types.encode(message))
        except OSError as error:
            raise self._write_error(error) from error
        self.counts[topic] = self.counts.get(topic, 0) + 1
