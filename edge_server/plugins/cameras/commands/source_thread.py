"""Thread of `edge-server stream` that reads pictures from a camera, file or folder, and offers each one, at its time,
to every frame stream of the command."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge_server.errors import EdgeServerError
from edge_server.plugins.cameras.commands.stream_sender import StreamSender
from edge_server.plugins.cameras.sources.frame_encoding import encode_frame
from edge_server.plugins.cameras.sources.frame_schedule import FrameSchedule
from edge_server.plugins.cameras.sources.source_interface import Source
from edge_server.protocol.frame_messages import FrameHeader

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """Playback of a source. With `fps` 0, pictures are sent as fast as the server accepts them, without client drops.

    `max_frames` and `max_s` limit the playback; 0 means no limit.
    """

    fps: float = 0.0
    encoding: str = ""
    max_frames: int = 0
    max_s: float = 0.0
    has_loop: bool = False


class SourceThread:
    """Thread that plays a source. `picture_count` counts the offered pictures. `error` is set if reading failed."""

    def __init__(self, source: Source, cameras: Sequence[StreamSender], source_settings: SourceSettings) -> None:
        self._source = source
        self._cameras = cameras
        self._settings = source_settings
        self._schedule = FrameSchedule(0.0 if source.is_live else source_settings.fps)
        self._stop = threading.Event()
        self._began = time.monotonic()
        self.picture_count = 0
        self.has_reached_end = False
        self.error: EdgeServerError | None = None
        self._thread = threading.Thread(target=self._play, name="source", daemon=True)
        self._thread.start()

    @property
    def slips(self) -> int:
        """How often a picture was late by more than one period."""
        return self._schedule.slips

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended. Return False after the timeout, for example with a stalled camera."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _play(self) -> None:
        try:
            while not self._stop.is_set() and not self._is_at_limit():
                picture = self._source.read()
                if picture is None:
                    if not self._settings.has_loop:
                        self.has_reached_end = True
                        break
                    self._source.rewind()
                    continue
                # Encode before waiting, so that the frame is sent on time.
                frame = encode_frame(picture, self._settings.encoding, FrameHeader())
                if not self._wait_until_due():
                    break
                sec, nanosec = divmod(picture.stamp_ns or time.time_ns(), 1_000_000_000)
                self.picture_count += 1
                for camera in self._cameras:
                    camera.offer(replace(frame, header=FrameHeader(sec, nanosec, camera.name, self.picture_count)))
        except EdgeServerError as error:
            self.error = error.detached()
        finally:
            for camera in self._cameras:
                camera.finish()

    def _is_at_limit(self) -> bool:
        limits = self._settings
        is_over_time = bool(limits.max_s) and time.monotonic() - self._began >= limits.max_s
        is_enough = 0 < limits.max_frames <= self.picture_count
        return is_over_time or is_enough or not any(one.is_alive for one in self._cameras)

    def _wait_until_due(self) -> bool:
        """Wait until the next picture is due, and without drops until there is room. Return False if stopped."""
        if self._stop.wait(self._schedule.wait_s(time.monotonic())):
            return False
        if self._settings.fps or self._source.is_live:
            return True
        for camera in self._cameras:
            while not camera.wait_for_room(_POLL_S):
                if self._stop.is_set() or self._is_at_limit():
                    return False
        return True
