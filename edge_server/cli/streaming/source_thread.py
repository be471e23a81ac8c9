"""Source thread: reads the source and gives each picture to every stream when it is due."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge_server.cli.sources.frame_encoding import pack
from edge_server.cli.sources.frame_schedule import FrameSchedule
from edge_server.cli.sources.source_interface import Source
from edge_server.cli.streaming.stream_sender import StreamSender
from edge_server.core.frame_stream_types import FrameHeader
from edge_server.errors import EdgeServerError

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """How a source is played. `fps` 0: as fast as the server takes them, and none is dropped for want of room.

    `most_frames` and `most_s` end it early; 0 leaves a limit out.
    """

    fps: float = 0.0
    encoding: str = ""
    most_frames: int = 0
    most_s: float = 0.0
    has_loop: bool = False


class SourceThread:
    """`given` counts the pictures so far. `error` is why it ended early, where it did."""

    def __init__(self, source: Source, cameras: Sequence[StreamSender], feeding: SourceSettings) -> None:
        self._source = source
        self._cameras = cameras
        self._feeding = feeding
        self._pace = FrameSchedule(0.0 if source.is_live else feeding.fps)
        self._stop = threading.Event()
        self._began = time.monotonic()
        self.given = 0
        self.has_reached_end = False
        self.error: EdgeServerError | None = None
        self._thread = threading.Thread(target=self._run, name="source", daemon=True)
        self._thread.start()

    @property
    def slips(self) -> int:
        """How often the source was later than its rate by a whole picture."""
        return self._pace.slips

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Wait until it has ended; False when the time is over first, as with a camera that gives no picture."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and not self._is_enough():
                shot = self._source.read()
                if shot is None:
                    if not self._feeding.has_loop:
                        self.has_reached_end = True
                        break
                    self._source.rewind()
                    continue
                # Made ready before it is due, for then it goes out in time.
                frame = pack(shot, self._feeding.encoding, FrameHeader())
                if not self._wait():
                    break
                sec, nanosec = divmod(time.time_ns(), 1_000_000_000)
                self.given += 1
                for camera in self._cameras:
                    camera.offer(replace(frame, header=FrameHeader(sec, nanosec, camera.name, self.given)))
        except EdgeServerError as error:
            self.error = error.detached()
        finally:
            for camera in self._cameras:
                camera.finish()

    def _is_enough(self) -> bool:
        most = self._feeding
        is_late = bool(most.most_s) and time.monotonic() - self._began >= most.most_s
        return is_late or (0 < most.most_frames <= self.given) or not any(one.is_alive for one in self._cameras)

    def _wait(self) -> bool:
        """Wait until the next picture is due, and has room where none may be dropped; False when told to stop."""
        if self._stop.wait(self._pace.wait_s(time.monotonic())):
            return False
        if self._feeding.fps or self._source.is_live:
            return True
        for camera in self._cameras:
            while not camera.wait_for_room(_LOOK_S):
                if self._stop.is_set() or self._is_enough():
                    return False
        return True
