"""Flow control of the client: the newest frame is kept, the credit is respected, each frame is counted exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.client.frame_flow_control import Counters, FlowControl
from edge_server.core.back_off import BackOff
from edge_server.protocol.frame_codec import EncodedFrame
from edge_server.protocol.frame_messages import DropReason


def frame(seq: int, age_us: int = 0) -> EncodedFrame:
    return EncodedFrame(bytes([seq % 256]), age_us, b"")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("offer")),
        st.tuples(st.just("take_frame")),
        st.tuples(st.just("allow"), st.integers(0, 20)),
        st.tuples(
            st.just("count_result"), st.dictionaries(st.sampled_from(list(DropReason)), st.integers(0, 4), max_size=2)
        ),
        st.tuples(st.just("count_drop_notice"), st.sampled_from(list(DropReason))),
        st.tuples(st.just("connect")),
        st.tuples(st.just("disconnect")),
        st.tuples(st.just("clear")),
    ),
    max_size=60,
)


@given(st.integers(1, 3), st.integers(0, 2), STEPS)
def test_counts_add_up_for_any_messages_of_the_server(depth: int, most: int, steps: list[tuple]) -> None:
    flow = FlowControl(depth, most)
    offered = 0
    for name, *arguments in steps:
        if name == "offer":
            offered += 1
            flow.offer(frame(offered), 0.0)
        elif name == "take_frame":
            flow.take_frame(0.0)
        else:
            getattr(flow, name)(*arguments)
        now = flow.counters()
        assert now.offered == offered == now.sent + now.dropped_here + now.waiting
        assert now.sent == now.answered + sum(now.dropped.values()) + now.in_flight + now.lost
        assert min(now.in_flight, now.waiting, now.lost, now.answered, now.dropped_here) >= 0
        assert now.waiting <= depth
        assert not most or now.in_flight <= most


def test_without_credit_no_frame_is_sent_and_credit_never_decreases() -> None:
    flow = FlowControl(2)
    flow.connect()
    flow.offer(frame(1), 0.0)
    assert flow.take_frame(0.0) is None
    flow.allow(2)
    flow.allow(0)
    flow.offer(frame(2), 0.0)
    flow.offer(frame(3), 0.0)
    assert [flow.take_frame(0.0).fields for _ in range(2)] == [b"\x02", b"\x03"]
    flow.offer(frame(4), 0.0)
    assert flow.take_frame(0.0) is None
    assert flow.counters() == Counters(offered=4, sent=2, dropped_here=1, waiting=1, in_flight=2, connections=1)


def test_a_new_connection_needs_its_own_credit() -> None:
    flow = FlowControl(1)
    flow.connect()
    flow.allow(5)
    flow.offer(frame(1), 0.0)
    assert flow.take_frame(0.0) is not None
    flow.disconnect()
    flow.offer(frame(2), 0.0)
    assert flow.take_frame(0.0) is None
    flow.connect()
    assert flow.take_frame(0.0) is None
    flow.allow(1)
    assert flow.take_frame(0.0) is not None
    assert flow.counters() == Counters(offered=2, sent=2, in_flight=1, lost=1, connections=2)


def test_the_limit_of_frames_in_flight_delays_the_next_frame() -> None:
    flow = FlowControl(3, 1)
    flow.allow(100)
    for seq in (1, 2, 3):
        flow.offer(frame(seq), 0.0)
    assert flow.take_frame(0.0) is not None
    assert flow.take_frame(0.0) is None
    flow.count_result({})
    assert flow.take_frame(0.0) is not None
    flow.count_drop_notice(DropReason.MAX_AGE)
    assert flow.take_frame(0.0) is not None


@pytest.mark.parametrize("is_notice_first", [True, False])
def test_a_drop_reported_twice_counts_once(is_notice_first: bool) -> None:
    flow = FlowControl(5)
    flow.allow(100)
    for seq in range(5):
        flow.offer(frame(seq), 0.0)
        flow.take_frame(0.0)
    if is_notice_first:
        flow.count_drop_notice(DropReason.NEWER)
        flow.count_result({DropReason.NEWER: 1})
    else:
        flow.count_result({DropReason.NEWER: 1})
        flow.count_drop_notice(DropReason.NEWER)
    assert flow.counters().dropped == {DropReason.NEWER: 1}
    flow.count_drop_notice(DropReason.NEWER)
    assert flow.counters().dropped == {DropReason.NEWER: 2}
    flow.count_result({DropReason.NEWER: 1})
    assert flow.counters() == Counters(offered=5, sent=5, answered=2, dropped={DropReason.NEWER: 2}, in_flight=1)


def test_the_age_of_a_frame_includes_its_wait_and_fits_its_field() -> None:
    flow = FlowControl(2)
    flow.allow(2)
    flow.offer(frame(1, age_us=500), 10.0)
    flow.offer(frame(2, age_us=2**32 - 10), 10.0)
    assert [flow.take_frame(10.25).age_us, flow.take_frame(10.25).age_us] == [250_500, 2**32 - 1]


@given(st.integers(1, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_backoff_grows_to_its_limit_and_jitter_only_shortens_it(failures: int, jitter: float, chance: float) -> None:
    back_off = BackOff(0.1, 5.0, jitter)
    whole = back_off.delay_s(failures, 0.0)
    assert whole == min(5.0, 0.1 * 2 ** min(failures - 1, 40))
    assert whole * (1 - jitter) * 0.999 <= back_off.delay_s(failures, chance) <= whole


@pytest.mark.parametrize("options", [(0, 1), (2, 1), (-1, 1), (1, 2, 1.5), (1, 2, -0.1)])
def test_an_invalid_backoff_is_refused(options: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="back-off needs"):
        BackOff(*options)
