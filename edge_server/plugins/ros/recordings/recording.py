"""Reader of the images in ROS recordings, without ROS: rosbag2 (MCAP or SQLite) and bags of ROS 1, in the order of
time."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from edge_server.errors import InvalidRequest, NotFound
from edge_server.plugins.ros.messages.message_conversion import MessageKind, kind_of, make_frame
from edge_server.plugins.ros.messages.ros2_types import MessageTypes, import_library
from edge_server.plugins.ros.recordings.mcap_reader import McapReader, RecordedChannel, RecordedMessage
from edge_server.protocol.frame_messages import Frame

_IMAGES = (MessageKind.IMAGE, MessageKind.COMPRESSED_IMAGE)
_DEPTH_ENCODINGS = ("16UC1", "32FC1")


@dataclass(frozen=True, slots=True)
class RecordedFrame:
    """An image of a topic and its time in the recording, in nanoseconds of the recorder's clock.

    `error` says why a message is no image; `frame` is None then.
    """

    topic: str
    recorded_ns: int
    frame: Frame | None
    error: str = ""


class ImageRecording:
    """Reader of a recording's images; use it in a `with` statement.

    `path` is a .mcap, .db3 or .bag file, or a rosbag2 folder. Raises NotFound when it does not exist, InvalidRequest
    when it cannot be read, Unsupported without rosbags.
    """

    def __init__(self, path: Path, types: MessageTypes) -> None:
        if not path.exists():
            raise NotFound(f"there is no recording '{path}'")
        self._path = path
        self._reader, self._decode = _open_reader(path, types)

    def __enter__(self) -> ImageRecording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()

    @property
    def damage(self) -> Sequence[str]:
        """Sentences about parts that cannot be read. Grows while frames are read."""
        return self._reader.damage

    @property
    def skipped_count(self) -> int:
        """Damaged parts in the middle of the recording, so far."""
        return self._reader.skipped_count

    def image_topics(self) -> dict[str, int]:
        """Return the topics of Image or CompressedImage with their numbers of messages."""
        found: dict[str, int] = {}
        for channel, count in sorted(self._reader.channels().items()):
            if _has_images(channel):
                found[channel.topic] = found.get(channel.topic, 0) + count
        return found

    def choose_topics(self, names: Sequence[str] = ()) -> tuple[dict[str, int], dict[str, str]]:
        """Return the named image topics with their numbers of messages, and the others with the reason.

        Without names all are chosen but for those without messages, those of depth, and `.../compressed` beside its
        raw images. Raises NotFound, and InvalidRequest when nothing is left.
        """
        topics = self.image_topics()
        if names:
            return {name: topics[name] for name in (self._find_topic(name, topics) for name in names)}, {}
        if not topics:
            others = sorted(
                f"{topic} ({type_name}{'' if encoding == 'cdr' else f', {encoding}'})"
                for topic, type_name, encoding in self._reader.channels()
            )
            raise InvalidRequest(
                f"'{self._path}' has no topic of sensor_msgs Image or CompressedImage; "
                f"it has {', '.join(others[:50]) or 'no topic at all'}"
            )
        skipped = {topic: reason for topic in topics if (reason := self._reason_to_skip(topic, topics))}
        chosen = {topic: count for topic, count in topics.items() if topic not in skipped}
        if not chosen:
            reasons = ", ".join(f"{topic} ({reason})" for topic, reason in skipped.items())
            raise InvalidRequest(f"'{self._path}' has no images of a camera: {reasons}; name one with --topic")
        return chosen, skipped

    def _find_topic(self, name: str, topics: Mapping[str, int]) -> str:
        for found in (name, f"/{name}"):
            if found in topics:
                return found
        listed = ", ".join(topics) or "none"
        raise NotFound(f"'{self._path}' has no images on topic '{name}'; topics with images: {listed}")

    def _reason_to_skip(self, topic: str, topics: Mapping[str, int]) -> str:
        raw = topic.removesuffix("/compressed")
        if raw != topic and raw in topics:
            return f"the pictures of {raw}"
        first = next(self.frames([topic]), None)
        if first is None:
            return "no message"
        frame = first.frame
        if frame is None:
            return ""
        encoding = frame.encoding or frame.format.partition(";")[0].strip()
        if encoding in _DEPTH_ENCODINGS or "compressedDepth" in frame.format:
            return f"depth, {frame.encoding or frame.format}"
        return ""

    def frames(self, topics: Iterable[str]) -> Iterator[RecordedFrame]:
        """Yield the images of some topics in the order of time, with `seq` from 1 for each topic.

        Raises InvalidRequest.
        """
        seqs = dict.fromkeys(topics, 0)
        for recorded_ns, channel, data in self._reader.messages(list(seqs)):
            if not _has_images(channel):
                continue
            topic = channel.topic
            seqs[topic] += 1
            try:
                frame = make_frame(self._decode(data, channel.type_name), seq=seqs[topic])
            except InvalidRequest as error:
                text = f"{topic}, message {seqs[topic]}: {error.message}"
                yield RecordedFrame(topic, recorded_ns, None, text)
                continue
            yield RecordedFrame(topic, recorded_ns, frame)


def _has_images(channel: RecordedChannel) -> bool:
    return channel.encoding == "cdr" and kind_of(channel.type_name) in _IMAGES


def _open_reader(path: Path, types: MessageTypes) -> tuple[McapReader | _RosbagsReader, Callable[[Any, str], Any]]:
    """Return the reader for a file or folder, and the decoder of its messages. A folder may lack metadata.yaml, which
    is written last."""
    files = sorted(path.glob("*.mcap")) if path.is_dir() else [path] if path.suffix == ".mcap" else []
    if files:
        return McapReader(files), types.decode
    parts = [path]
    if path.is_dir() and not (path / "metadata.yaml").exists():
        parts = sorted(path.glob("*.db3"))
        if not parts:
            raise InvalidRequest(f"folder '{path}' has no recording: expected files .mcap or .db3, or a metadata.yaml")
    reader = _RosbagsReader(path, parts, types)
    return reader, reader.decode


class _RosbagsReader:
    """Reader of SQLite files and of ROS 1 bags, by the library rosbags. Its methods are those of McapReader."""

    damage: Sequence[str] = ()
    skipped_count = 0

    def __init__(self, path: Path, parts: Sequence[Path], types: MessageTypes) -> None:
        reading: Any = import_library("rosbags.highlevel")
        self._any_reader_error: type[Exception] = reading.anyreader.AnyReaderError
        self._errors = (self._any_reader_error, *reading.anyreader.ReaderErrors)
        self._path = path
        with self._translate_errors():
            self._reader: Any = reading.AnyReader(parts, default_typestore=types.store)
            self._reader.open()

    def close(self) -> None:
        self._reader.close()

    def channels(self) -> Counter[RecordedChannel]:
        found: Counter[RecordedChannel] = Counter()
        for connection in self._reader.connections:
            found[_channel_of(connection)] += int(connection.msgcount)
        return found

    def messages(self, topics: Sequence[str]) -> Iterator[RecordedMessage]:
        connections = [one for one in self._reader.connections if one.topic in topics]
        with self._translate_errors():
            for connection, recorded_ns, data in self._reader.messages(connections=connections):
                yield RecordedMessage(recorded_ns, _channel_of(connection), memoryview(data))

    def decode(self, data: memoryview, type_name: str) -> Any:
        try:
            return self._reader.deserialize(data, type_name)
        except self._any_reader_error as error:
            raise InvalidRequest(f"expected a message of {type_name}: {error}") from error

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (*self._errors, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise InvalidRequest(f"recording '{self._path}' cannot be read: {reason}") from error


def _channel_of(connection: Any) -> RecordedChannel:
    """Return a connection of rosbags. Its reader decodes the messages of ROS 1 as those of ROS 2."""
    return RecordedChannel(connection.topic, connection.msgtype, "cdr")
