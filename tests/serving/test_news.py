"""What the manager announces: in order, once, and past whoever is told of it."""

from __future__ import annotations

import threading
from typing import Any

from edge_server.serving.lifecycle.event_queue import ModelEventQueue


def test_what_was_noted_is_told_once_and_in_order() -> None:
    told: list[tuple[str, Any]] = []
    news = ModelEventQueue(lambda kind, /, **fields: told.append((kind, fields["number"])))
    for number in range(3):
        news.add("model.ready", number=number)
    assert told == []
    news.tell()
    news.tell()
    assert told == [("model.ready", 0), ("model.ready", 1), ("model.ready", 2)]


def test_who_is_told_may_bring_about_news_and_tell_them() -> None:
    told: list[str] = []

    def announce(kind: str, /, **fields: object) -> None:
        told.append(kind)
        if kind == "first":
            news.add("third")
            news.tell()

    news = ModelEventQueue(announce)
    news.add("first")
    news.add("second")
    news.tell()
    assert told == ["first", "second", "third"]


def test_many_threads_tell_everything_once_and_each_in_its_order() -> None:
    told: list[tuple[int, int]] = []
    news = ModelEventQueue(lambda kind, /, **fields: told.append((fields["thread"], fields["number"])))  # type: ignore[arg-type]
    mine: list[bool] = []

    def work(thread: int) -> None:
        for number in range(200):
            news.add("step", thread=thread, number=number)
            news.tell()
            mine.append((thread, number) in told)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(mine), "who tells comes back when its own news were announced"
    assert len(told) == len(set(told)) == 800
    assert [[number for who, number in told if who == thread] for thread in range(4)] == [list(range(200))] * 4


def test_without_a_listener_nothing_is_kept() -> None:
    news = ModelEventQueue()
    news.add("model.ready", model="m")
    news.tell()
    told: list[str] = []
    news.announce = lambda kind, /, **fields: told.append(kind)
    news.tell()
    assert told == []
