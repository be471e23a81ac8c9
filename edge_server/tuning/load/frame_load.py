"""Frame load: streams that send the newest picture at a fixed rate, and the fate of each frame."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from edge_server.client import Frame, FrameHeader, FrameStream
from edge_server.core.frame_stream_types import Buffer
from edge_server.errors import EdgeServerError
from edge_server.tuning.load.load_generator import WorkerThreads
from edge_server.tuning.load.measurement_windows import Answer

PICTURES = 4
"""How many different pictures are sent in turns."""


def made_up_pictures(width: int, height: int, seed: int = 0) -> list[bytes]:
    """Return pictures of random colours, bgr8."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, (height, width, 3), np.uint8).tobytes() for _ in range(PICTURES)]


class FrameLoad(WorkerThreads):
    """Streams that each send pictures at the same intervals. The time of a frame is from sending it to its result."""

    def __init__(
        self,
        streams: Sequence[FrameStream],
        pictures: Sequence[Buffer],
        size: tuple[int, int],
        intervals_s: Sequence[Iterator[float]],
    ) -> None:
        super().__init__(len(streams), self._feed, self._read)
        self._streams = streams
        self._pictures = pictures
        self._size = size
        self._intervals_s = intervals_s
        self._sent_s: list[dict[int, tuple[float, float]]] = [{} for _ in streams]

    def _close(self) -> None:
        for stream in self._streams:
            stream.close()

    def dropped(self) -> dict[str, int]:
        """Return the frames that got no result since the load began, by reason; `here`: never sent, as a newer came."""
        counted: Counter[str] = Counter()
        for stream in self._streams:
            counters = stream.counters()
            counted["here"] += counters.dropped_here
            counted["lost"] += counters.lost
            for reason, count in counters.dropped.items():
                counted[reason.name.lower()] += count
        return {reason: count for reason, count in counted.items() if count}

    def _feed(self, index: int) -> None:
        stream, sent_s = self._streams[index], self._sent_s[index]
        width, height = self._size
        due_s = time.perf_counter()
        for number, interval_s in enumerate(self._intervals_s[index]):
            due_s += interval_s
            if self._is_over.wait(max(due_s - time.perf_counter(), 0.0)):
                return
            header = FrameHeader(0, 0, "perf", number)
            picture = self._pictures[number % len(self._pictures)]
            frame = Frame(
                header=header, data=picture, height=height, width=width, encoding="bgr8", step=width * 3
            )  # fmt: skip
            now = time.perf_counter()
            sent_s[number] = (now, now - due_s)
            try:
                stream.send(frame)
            except ValueError:
                return  # it was closed between the two lines above

    def _read(self, index: int) -> None:
        sent_s = self._sent_s[index]
        try:
            for result in self._streams[index].results():
                now = time.perf_counter()
                start_s, lag_s = sent_s.pop(result.header.seq, (now, 0.0))
                # Results come in order: what is older has been dropped.
                for number in [number for number in list(sent_s) if number < result.header.seq]:
                    del sent_s[number]
                self._answers.append(Answer(start_s, now, result.error_code, result.error, lag_s))
        except EdgeServerError:
            # A stream that ends because it is closed has nothing to tell.
            if not self._is_over.is_set():
                raise
