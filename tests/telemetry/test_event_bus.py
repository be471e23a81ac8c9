"""Event bus: subscribers, history and numbers."""

import logging
import threading

from edge_server.telemetry.event_bus import MODEL_FAILED, MODEL_READY, EventBus


def test_subscribers_get_events_until_they_leave():
    bus = EventBus(clock=lambda: 5.0)
    seen = []
    leave = bus.subscribe(seen.append)
    bus.publish(MODEL_READY, model="m", version=1)
    leave()
    leave()
    bus.publish(MODEL_FAILED, model="m", version=2, reason="broken")
    (event,) = seen
    assert (event.number, event.time_s, event.kind, event.fields) == (1, 5.0, MODEL_READY, {"model": "m", "version": 1})


def test_the_history_is_bounded_and_read_from_a_number_on():
    bus = EventBus(history_size=3)
    for _ in range(5):
        bus.publish(MODEL_READY)
    assert [event.number for event in bus.history()] == [3, 4, 5]
    assert [event.number for event in bus.history(after=4)] == [5]


def test_frequent_events_displace_no_others_from_the_history():
    bus = EventBus(history_size=3)
    bus.publish(MODEL_READY)
    for _ in range(5):
        bus.publish_frequent("line.crossed")
    bus.publish(MODEL_FAILED)
    assert [event.number for event in bus.history()] == [1, 4, 5, 6, 7]
    assert [event.number for event in bus.history(after=5)] == [6, 7]


def test_a_failing_subscriber_does_not_affect_others(caplog):
    bus = EventBus()
    seen = []

    def fail(event):
        raise RuntimeError("no")

    bus.subscribe(fail)
    bus.subscribe(seen.append)
    with caplog.at_level(logging.ERROR, "edge_server.telemetry.event_bus"):
        bus.publish(MODEL_READY)
    assert len(seen) == 1
    assert "a subscriber failed on event 1" in caplog.text


def test_a_subscriber_may_publish_and_leave_while_it_is_called():
    bus = EventBus()
    seen = []

    def once(event):
        seen.append(event.number)
        leave()
        bus.publish(MODEL_FAILED)

    leave = bus.subscribe(once)
    bus.publish(MODEL_READY)
    assert seen == [1]
    assert [event.number for event in bus.history()] == [1, 2]


def test_concurrent_publishers_lose_nothing_and_number_everything_once():
    bus = EventBus(history_size=10_000)
    threads = [threading.Thread(target=lambda: [bus.publish(MODEL_READY) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event.number for event in bus.history()] == list(range(1, 2001))


def test_event_numbers_belong_to_one_run_of_the_server():
    first, second = EventBus(history_size=2), EventBus()
    assert first.run_id != second.run_id
    assert first.latest() == 0
    for _ in range(5):
        first.publish(MODEL_READY)
    assert (first.latest(), second.latest()) == (5, 0)
