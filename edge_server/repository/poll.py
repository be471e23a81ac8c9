"""Mode `poll`: look at the repositories every so often, and state the wish anew when they have come to rest."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from edge_server.core.lifecycle import ModelWish
from edge_server.errors import EdgeServerError
from edge_server.repository.source import RepositorySource

log = logging.getLogger(__name__)


class Poller:
    """Calls `wish_for_all` from a thread of its own. A model counts only when two looks in a row find the same."""

    def __init__(
        self,
        source: RepositorySource,
        first: Mapping[str, ModelWish],
        wish_for_all: Callable[[Mapping[str, ModelWish]], None],
        interval_s: float,
    ) -> None:
        self._source = source
        self._wish_for_all = wish_for_all
        self._interval_s = interval_s
        self._last_look: Mapping[str, ModelWish] = first
        self._wished: Mapping[str, ModelWish] = first
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="edge-poll", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._closing.set()
        self._thread.join()

    def look(self) -> None:
        """Look once, and state the wish if anything that is at rest differs from the last one stated."""
        try:
            found, _ = self._source.wishes()
        except EdgeServerError as error:
            # What serves goes on serving: a repository that cannot be read says nothing about what is wished for.
            log.warning("the repository cannot be read; trying again in %g s: %s", self._interval_s, error)
            return
        wished = at_rest(self._wished, self._last_look, found)
        self._last_look = found
        if wished != self._wished:
            self._wished = wished
            self._wish_for_all(wished)

    def _loop(self) -> None:
        while not self._closing.wait(self._interval_s):
            self.look()


def at_rest(
    wished: Mapping[str, ModelWish], before: Mapping[str, ModelWish], now: Mapping[str, ModelWish]
) -> dict[str, ModelWish]:
    """Return the wish after a look: each model as it is now if the look before found the same, else as wished so far.

    A model that is gone in both looks is left out, which is the order to unload it.
    """
    after: dict[str, ModelWish] = {}
    for name in sorted({*wished, *now}):
        chosen = now.get(name) if now.get(name) == before.get(name) else wished.get(name)
        if chosen is not None:
            after[name] = chosen
    return after
