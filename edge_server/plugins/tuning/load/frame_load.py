"""Load of camera frames for a measurement: streams that send frames at a fixed rate, and count results and drops."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from edge_server.client import Frame, FrameHeader, FrameStream
from edge_server.errors import EdgeServerError
from edge_server.plugins.tuning.load.measurement_results import Answer
from edge_server.protocol.frame_messages import Buffer

IMAGE_COUNT = 4
"""Number of different images; each stream sends them in turn."""


def random_images(width: int, height: int, seed: int = 0) -> list[bytes]:
    """Return images of random pixels in bgr8."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, (height, width, 3), np.uint8).tobytes() for _ in range(IMAGE_COUNT)]


class FrameLoad:
    """Context manager with frame streams that each send images at given intervals. Latency is the time from sending a
    frame to its result.

    Each stream has one sending and one receiving thread.
    """

    def __init__(
        self,
        streams: Sequence[FrameStream],
        images: Sequence[Buffer],
        size: tuple[int, int],
        intervals_s: Sequence[Iterator[float]],
    ) -> None:
        self._is_over = threading.Event()
        self._answers: deque[Answer] = deque()
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(function, index), name=f"perf-{index}", daemon=True)
            for index in range(len(streams))
            for function in (self._send_frames, self._receive_results)
        ]
        self._streams = streams
        self._images = images
        self._size = size
        self._intervals_s = intervals_s
        self._sent_s: list[dict[int, tuple[float, float]]] = [{} for _ in streams]

    def __enter__(self) -> FrameLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for stream in self._streams:
            stream.close()
        for thread in self._threads:
            thread.join()

    def take_answers(self) -> list[Answer]:
        """Return the answers since the last call. Raises the error that stopped a thread."""
        if self._error is not None:
            raise self._error
        answers = []
        while self._answers:
            answers.append(self._answers.popleft())
        return answers

    def dropped(self) -> dict[str, int]:
        """Return the number of frames without a result since the start of the load, by reason.

        `here` counts frames that the client dropped before sending, because a newer frame replaced them.
        """
        counted: Counter[str] = Counter()
        for stream in self._streams:
            counters = stream.counters()
            counted["here"] += counters.dropped_here
            counted["lost"] += counters.lost
            for reason, count in counters.dropped.items():
                counted[reason.name.lower()] += count
        return {reason: count for reason, count in counted.items() if count}

    def _run(self, function: Callable[[int], None], index: int) -> None:
        try:
            function(index)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: `take_answers` raises it in the caller
            self._error = error

    def _send_frames(self, index: int) -> None:
        stream, sent_s = self._streams[index], self._sent_s[index]
        width, height = self._size
        due_s = time.perf_counter()
        for number, interval_s in enumerate(self._intervals_s[index]):
            due_s += interval_s
            if self._is_over.wait(max(due_s - time.perf_counter(), 0.0)):
                return
            header = FrameHeader(0, 0, "perf", number)
            image = self._images[number % len(self._images)]
            frame = Frame(
                header=header, data=image, height=height, width=width, encoding="bgr8", step=width * 3
            )  # fmt: skip
            now = time.perf_counter()
            sent_s[number] = (now, now - due_s)
            try:
                stream.send(frame)
            except ValueError:
                return  # another thread closed the stream in the meantime

    def _receive_results(self, index: int) -> None:
        sent_s = self._sent_s[index]
        try:
            for result in self._streams[index].results():
                now = time.perf_counter()
                start_s, lag_s = sent_s.pop(result.header.seq, (now, 0.0))
                # Results arrive in order, so the older frames were dropped.
                for number in [number for number in list(sent_s) if number < result.header.seq]:
                    del sent_s[number]
                self._answers.append(Answer(start_s, now, result.error_code, result.error, lag_s))
        except EdgeServerError:
            # At the end of the load the streams are closed, which is no failure.
            if not self._is_over.is_set():
                raise
