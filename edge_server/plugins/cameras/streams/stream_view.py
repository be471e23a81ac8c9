"""Picture for people who watch a frame stream: draws the results into the newest frame, only when somebody asks for it.

A picture is made only on demand. Each viewer asks for the next one when it has sent the one before, so a viewer that
does not read costs nothing. The worker only passes pixels and results on; a thread of the viewer draws and encodes
them, once for all viewers of the stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.protocol.frame_messages import Buffer, FrameHeader

if TYPE_CHECKING:
    from edge_server.plugins.vision.perception_decoder import Perception
    from edge_server.plugins.vision.picture import Picture

MAX_PICTURES_PER_S = 5
"""Maximum number of pictures a second of one stream."""

MAX_SIDE = 960
"""Longer side of a picture, in pixels; larger frames are reduced."""

_INTERVAL_NS = 1_000_000_000 // MAX_PICTURES_PER_S


@dataclass(frozen=True, slots=True)
class ViewedFrame:
    """A frame and its results, which are in its own pixels."""

    header: FrameHeader
    picture: Picture
    seen: Perception


class StreamView:
    """The view of one stream. Thread-safe. `viewer_count` belongs to the registry, under its lock."""

    def __init__(self) -> None:
        self.viewer_count = 0
        self._lock = threading.Lock()
        self._encoding = threading.Lock()
        self._waiting: set[Callable[[], None]] = set()
        self._next_ns = 0
        self._newest: ViewedFrame | None = None
        self._jpegs: dict[bool, Buffer] = {}
        """The newest frame as JPEG, with and without its results drawn in, once a viewer wanted it."""
        self.is_over = False
        """Whether the stream has ended. Viewers have been notified."""

    # -- viewers

    def notify_once(self, notify: Callable[[], None]) -> None:
        """Call `notify` once, on any thread, when there is a new picture or the stream has ended."""
        with self._lock:
            self._waiting.add(notify)
        if self.is_over:
            self._notify_viewers()

    def release(self) -> None:
        """Release the newest picture: there is no viewer any more."""
        with self._lock:
            self._newest, self._jpegs = None, {}

    def cancel_notify(self, notify: Callable[[], None]) -> None:
        """Do not call `notify` any more: the viewer has left."""
        with self._lock:
            self._waiting.discard(notify)

    def jpeg(self) -> Buffer:
        """Return the newest frame with its results drawn in, as JPEG; b"" if there is none. *Blocking* for the time of
        drawing and encoding."""
        found = self._encoded(is_drawn=True)
        return b"" if found is None else found[1]

    def frame(self) -> tuple[ViewedFrame, Buffer] | None:
        """Return the newest frame and its JPEG without the results. *Blocking* for the time of encoding."""
        return self._encoded(is_drawn=False)

    def _encoded(self, *, is_drawn: bool) -> tuple[ViewedFrame, Buffer] | None:
        from edge_server.plugins.vision.draw import annotated_jpeg
        from edge_server.plugins.vision.perception_decoder import Perception

        with self._encoding:
            with self._lock:
                newest, jpegs = self._newest, self._jpegs
            if newest is None:
                return None
            if is_drawn not in jpegs:
                seen = newest.seen if is_drawn else Perception()
                jpegs[is_drawn] = annotated_jpeg(newest.picture.bgr(), seen, max_side=MAX_SIDE)
            return newest, jpegs[is_drawn]

    # -- the stream

    def wants(self, now_ns: int) -> bool:
        """Return whether a viewer waits for a picture, and the last one is old enough."""
        return bool(self._waiting) and now_ns >= self._next_ns

    def show(self, frame: ViewedFrame, now_ns: int) -> None:
        """Set the newest frame if a viewer still waits. The caller must not change its pixels any more."""
        with self._lock:
            if not self._waiting:
                return
            self._newest, self._jpegs = frame, {}
        # A picture that comes late does not delay the next one: frames seldom come exactly when a picture is due.
        self._next_ns = max(self._next_ns + _INTERVAL_NS, now_ns + _INTERVAL_NS // 2)
        self._notify_viewers()

    def end(self) -> None:
        """Note that the stream has ended."""
        self.is_over = True
        self._notify_viewers()

    def _notify_viewers(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, set()
        for notify in waiting:
            notify()
