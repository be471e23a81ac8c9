"""Model events are published in order, once, and also when a listener adds more."""

from __future__ import annotations

from typing import Any

from edge_server.telemetry.event_bus import EventQueue
from tests.kit.together import together


def test_events_are_published_once_and_in_order() -> None:
    published: list[tuple[str, Any]] = []
    events = EventQueue(lambda kind, /, **fields: published.append((kind, fields["number"])))
    for number in range(3):
        events.add("model.ready", number=number)
    assert published == []
    events.publish()
    events.publish()
    assert published == [("model.ready", 0), ("model.ready", 1), ("model.ready", 2)]


def test_a_subscriber_may_cause_and_publish_further_events() -> None:
    published: list[str] = []

    def publisher(kind: str, /, **fields: object) -> None:
        published.append(kind)
        if kind == "first":
            events.add("third")
            events.publish()

    events = EventQueue(publisher)
    events.add("first")
    events.add("second")
    events.publish()
    assert published == ["first", "second", "third"]


def test_many_threads_publish_everything_once_and_each_in_its_order() -> None:
    published: list[tuple[int, int]] = []
    events = EventQueue(lambda kind, /, **fields: published.append((fields["thread"], fields["number"])))  # type: ignore[arg-type]
    mine: list[bool] = []

    def work(thread: int) -> None:
        for number in range(200):
            events.add("step", thread=thread, number=number)
            events.publish()
            mine.append((thread, number) in published)

    together(work, range(4))
    assert all(mine), "publish returns when the own events are published"
    assert len(published) == len(set(published)) == 800
    assert [[number for who, number in published if who == thread] for thread in range(4)] == [list(range(200))] * 4


def test_without_a_listener_no_event_is_kept() -> None:
    events = EventQueue()
    events.add("model.ready", model="m")
    events.publish()
    published: list[str] = []
    events.publisher = lambda kind, /, **fields: published.append(kind)
    events.publish()
    assert published == []
