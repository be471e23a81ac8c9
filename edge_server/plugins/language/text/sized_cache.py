"""Cache of a function's results that is bounded by their memory."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def cache_up_to(max_bytes: int, size: Callable[[T], int]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that keeps a function's results by its arguments, as `functools.lru_cache` does.

    `size(result)`: bytes of a result. The results that were not asked for the longest are dropped while all together
    take more than `max_bytes`; a larger one is not kept. For any thread: two may make the same result at a time.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        kept: OrderedDict[object, tuple[T, int]] = OrderedDict()
        total = 0
        lock = threading.Lock()

        @functools.wraps(function)
        def cached(*arguments: P.args, **more: P.kwargs) -> T:
            nonlocal total
            key = arguments, tuple(more.items())
            with lock:
                if key in kept:
                    kept.move_to_end(key)
                    return kept[key][0]
            result = function(*arguments, **more)
            needed = size(result)
            with lock:
                if key not in kept:
                    kept[key] = result, needed
                    total += needed
                while total > max_bytes:
                    _, (_, freed) = kept.popitem(last=False)
                    total -= freed
            return result

        return cached

    return decorate
