"""What the log says of a bridge's connection to the server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from edge_server.client import StreamError
from edge_server.core.frame import StreamOpened

_TELL_AGAIN_S = 60.0

log = logging.getLogger(__name__)


class ConnectionLog:
    """Tells of connections made and broken; of a server that stays away once a minute, not at every try."""

    def __init__(self, topic: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._topic = topic
        self._clock = clock
        self._told: tuple[str, float] | None = None

    def broke(self, error: StreamError) -> None:
        now = self._clock()
        if self._told is None or self._told[0] != error.message or now - self._told[1] >= _TELL_AGAIN_S:
            self._told = error.message, now
            log.warning("%s; trying again", error)

    def opened(self, opened: StreamOpened) -> None:
        self._told = None
        log.info("%s goes to %s", self._topic, describe_server(opened))


def describe_server(opened: StreamOpened) -> str:
    """Return "yunet version 2 on openvino 2024.4"."""
    return f"{opened.model} version {opened.version} on {opened.runtime}"
