"""Writer of rosbag2 recordings without ROS, for `ros2 bag` of Humble and newer."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from edge_server.errors import InvalidRequest
from edge_server.plugins.ros.messages.message_conversion import OutgoingMessage
from edge_server.plugins.ros.messages.ros2_types import MessageTypes, import_library

_ROSBAG2_VERSION = 8
"""Humble and Iron cannot read the profiles of version 9; Jazzy and newer read both (rosbag2's metadata_io.cpp)."""

_OUTPUT_DEPTH = 10
_INFINITE = (9223372036, 854775807)
"""RMW_DURATION_INFINITE, seconds and nanoseconds."""


class RecordingWriter:
    """Writer of a recording; use it in a `with` statement. It gets its name when it is complete.

    A `path` that ends in .mcap becomes one file, any other path a folder with the MCAP file and its metadata.yaml. With
    an exception in the `with` statement, what was written until then is complete too, at `partial_path`. Without any
    message nothing remains. Raises InvalidRequest when one of both paths exists.
    """

    def __init__(self, path: Path, types: MessageTypes) -> None:
        self.partial_path = path.with_name(f"{path.stem}_partial{path.suffix}")
        if path.exists():
            raise InvalidRequest(f"'{path}' exists already and is not overwritten: remove it, or name another --output")
        if self.partial_path.exists():
            raise InvalidRequest(
                f"'{self.partial_path}' exists already: it is the result of an interrupted run; move or remove it first"
            )
        self._path = path
        self._types = types
        self._module: Any = import_library("rosbags.rosbag2")
        self._unfinished_folder = path.with_name(f".{path.name}.unfinished")
        self._folder = self._unfinished_folder / path.name.removesuffix(".mcap")
        self._connections: dict[str, Any] = {}
        self.counts: dict[str, int] = {}
        self.finished_path: Path | None = None
        """Where the recording is, once it is closed; None if nothing was written."""

    def __enter__(self) -> RecordingWriter:
        shutil.rmtree(self._unfinished_folder, ignore_errors=True)
        self._writer: Any = self._module.Writer(
            self._folder, version=_ROSBAG2_VERSION, storage_plugin=self._module.StoragePlugin.MCAP
        )
        self._writer.set_compression(self._module.CompressionMode.STORAGE, self._module.CompressionFormat.ZSTD)
        try:
            self._writer.open()
        except OSError as error:
            raise self._write_error(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None and not self.counts:
                self._writer.abort()
            else:
                self._finish(self._path if kind is None else self.partial_path)
        except OSError as fault:
            if kind is None:
                raise self._write_error(fault) from fault
        finally:
            shutil.rmtree(self._unfinished_folder, ignore_errors=True)

    def _finish(self, path: Path) -> None:
        self._writer.close()
        finished = next(self._folder.glob("*.mcap")) if path.suffix == ".mcap" else self._folder
        finished.rename(path)
        self.finished_path = path

    def _write_error(self, error: OSError) -> InvalidRequest:
        return InvalidRequest(f"'{self._path}' cannot be written: {error.strerror or error}")

    def write(self, topic: str, message: OutgoingMessage, recorded_ns: int) -> None:
        """Write a message with the time of its frame. Raises InvalidRequest for errors such as a full disk."""
        try:
            if topic not in self._connections:
                self._connections[topic] = self._writer.add_connection(
                    topic,
                    message.kind.value,
                    typestore=self._types.store,
                    offered_qos_profiles=[_default_qos()],
                )
            self._writer.write(self._connections[topic], recorded_ns, self._types.encode(message))
        except OSError as error:
            raise self._write_error(error) from error
        self.counts[topic] = self.counts.get(topic, 0) + 1


def _default_qos() -> Any:
    """Return the QoS of a publisher with ROS 2's defaults: reliable, volatile, the last ten messages."""
    names: Any = import_library("rosbags.interfaces")
    infinite = names.QosTime(*_INFINITE)
    return names.Qos(
        history=names.QosHistory.KEEP_LAST,
        depth=_OUTPUT_DEPTH,
        reliability=names.QosReliability.RELIABLE,
        durability=names.QosDurability.VOLATILE,
        deadline=infinite,
        lifespan=infinite,
        liveliness=names.QosLiveliness.AUTOMATIC,
        liveliness_lease_duration=infinite,
        avoid_ros_namespace_conventions=False,
    )
