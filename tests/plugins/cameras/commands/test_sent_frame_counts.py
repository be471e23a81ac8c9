"""Counts, rates, ages and percentiles of `edge-server stream`, and the table that shows them."""

from __future__ import annotations

import io
import math
import random
import re
from collections.abc import Callable

import pytest
from rich.cells import cell_len

from edge_server.cli.console import LiveView
from edge_server.plugins.cameras.commands.percentiles import Percentiles, RecentValues, percentile
from edge_server.plugins.cameras.commands.sent_frame_counts import RECENT_S, FrameCounts, StreamFigures, total
from edge_server.plugins.cameras.commands.stream_display import TableView, draw_table, plain_line, summary, table
from edge_server.protocol.frame_messages import DropReason, FrameHeader, FrameResult, FrameTimes, StreamCounts


def result(seq: int, finished_us: int = 2000, error: str = "") -> FrameResult:
    return FrameResult(FrameHeader(seq=seq), FrameTimes(finished_us=finished_us), error_code=error)


def figures(name: str = "cam", **changes: object) -> StreamFigures:
    known: dict[str, object] = {
        "fps_in": 30.0, "fps_out": 10.0, "age_p50_s": 0.05, "age_p99_s": 0.0801, "age_largest_s": 0.25,
        "server_p50_s": 0.04, "offered": 100, "answered": 40, "failed": 0, "lost": 2, "waiting": 0,
        "client_drops": 8, "server_drops": {DropReason.NEWER: 40, DropReason.MAX_AGE: 10},
    }  # fmt: skip
    return StreamFigures(name, **{**known, **changes})  # type: ignore[arg-type]


def test_a_steady_stream_has_its_rate_before_and_after_the_window_is_full() -> None:
    rate = RecentValues(2.0)
    for number in range(101):
        rate.add(100 + number / 25)
        if number:
            assert rate.rate(100 + number / 25) == pytest.approx(25, abs=0.6)


def test_the_rate_of_a_stopped_stream_falls_to_zero() -> None:
    rate = RecentValues(2.0)
    for number in range(50):
        rate.add(number / 25)
    assert rate.rate(3.0) == pytest.approx(12, abs=1)
    assert rate.rate(4.1) == 0
    assert rate.values(4.1) == []


def test_without_values_there_is_no_rate_and_no_percentile() -> None:
    assert RecentValues(1.0).rate(5.0) == 0
    assert math.isnan(percentile([], 0.5))
    assert math.isnan(Percentiles().percentile(0.5))


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3, 1, 2], 0.5, 2), ([1, 2, 3, 4], 0.5, 2), ([5], 0.99, 5), (list(range(1, 101)), 0.99, 99), ([1, 2], 1.0, 2)],
)
def test_a_percentile_is_one_of_the_values(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


def test_percentiles_in_bounded_memory_are_accurate_to_one_percent() -> None:
    generator = random.Random(3)
    values = [generator.lognormvariate(-3, 1) for _ in range(20_000)]
    spread = Percentiles()
    for value in values:
        spread.add(value)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        assert spread.percentile(share) == pytest.approx(percentile(values, share), rel=0.0101)
    assert spread.largest == max(values)
    assert spread.percentile(1.0) <= spread.largest


def test_joined_percentiles_are_those_of_all_values() -> None:
    one, two, both = Percentiles(), Percentiles(), Percentiles()
    for number in range(1, 400):
        for spread in (one if number % 3 else two, both):
            spread.add(number / 1000)
    joined = Percentiles.joined([one, two, Percentiles()])
    assert (joined.count, joined.largest) == (399, 0.399)
    assert [joined.percentile(share) for share in (0.1, 0.5, 0.99)] == [
        both.percentile(share) for share in (0.1, 0.5, 0.99)
    ]


def test_sent_frames_always_equal_answered_dropped_lost_and_in_flight() -> None:
    generator, tally, now, under_way = random.Random(7), FrameCounts("cam"), 0.0, []
    answered = here = lost = 0
    there: dict[DropReason, int] = {}
    for seq in range(5000):
        now += generator.random() / 30
        tally.count_offered(seq, now)
        under_way.append(seq)
        while under_way and generator.random() < 0.495:
            frame, fate = under_way.pop(0), generator.randrange(4)
            if fate == 0:
                reason = generator.choice([DropReason.NEWER, DropReason.MAX_AGE])
                there[reason] = there.get(reason, 0) + 1
                # The server does not report every drop by itself.
                if generator.random() < 0.5:
                    tally.count_server_drop(frame, reason)
            elif fate == 1:
                lost += 1
            elif fate == 2:
                here += 1
            else:
                answered += 1
                answer = result(frame)
                answer.counts = StreamCounts(dropped=dict(there))
                assert tally.count_result(answer, now) is not None
            tally.set_client_totals(here, lost)
        shown = tally.recent(now)
        assert shown.offered == shown.answered + shown.dropped + shown.lost + shown.waiting == seq + 1
    answer = result(under_way.pop(0))
    answer.counts = StreamCounts(dropped=dict(there))
    tally.count_result(answer, now)
    tally.end()
    whole = tally.whole()
    assert (whole.answered, whole.client_drops, whole.server_drops) == (answered + 1, here, there)
    assert (whole.waiting, whole.lost) == (0, lost + len(under_way))


def test_drops_of_an_earlier_run_under_the_same_name_do_not_count() -> None:
    tally = FrameCounts("cam")
    tally.set_server_baseline(StreamCounts(dropped={DropReason.NEWER: 100}))
    for seq in range(3):
        tally.count_offered(seq, 0.0)
    answer = result(1)
    answer.counts = StreamCounts(dropped={DropReason.NEWER: 101})
    tally.count_result(answer, 0.1)
    assert tally.count_server_drop(2, DropReason.DEADLINE)
    assert tally.whole().server_drops == {DropReason.NEWER: 1, DropReason.DEADLINE: 1}


def test_frames_lost_with_a_connection_are_lost_and_not_dropped() -> None:
    tally = FrameCounts("cam")
    for seq in range(3):
        tally.count_offered(seq, 0.0)
    tally.set_client_totals(0, 2)
    answer = result(2)
    answer.counts = StreamCounts(dropped={DropReason.CLOSED: 2})
    tally.count_result(answer, 0.1)
    assert (tally.whole().server_drops, tally.whole().lost, tally.whole().waiting) == ({}, 2, 0)


def test_memory_for_unreported_frames_is_bounded() -> None:
    tally = FrameCounts("cam")
    for seq in range(20_000):
        tally.count_offered(seq, seq / 30)
        if seq % 10 == 0:
            tally.count_result(result(seq), seq / 30)
    assert len(tally._sent) < 2000


def test_a_frame_is_counted_once_for_any_server_messages() -> None:
    tally = FrameCounts("cam")
    tally.count_offered(1, 0.0)
    assert tally.count_result(result(1), 0.5) == 0.5
    assert tally.count_result(result(1), 0.6) is None
    assert not tally.count_server_drop(1, DropReason.NEWER)
    assert not tally.count_server_drop(99, DropReason.NEWER)
    assert (tally.whole().answered, tally.whole().dropped, tally.whole().lost) == (1, 0, 0)


def test_an_error_counts_as_answered_and_as_failed() -> None:
    tally = FrameCounts("cam")
    tally.count_offered(1, 0.0)
    tally.count_result(result(1, error="INVALID_ARG"), 0.1)
    assert (tally.whole().answered, tally.whole().failed) == (1, 1)


def test_live_statistics_cover_a_window_and_totals_the_whole_run() -> None:
    tally = FrameCounts("cam")
    for seq in range(100):
        tally.count_offered(seq, seq * 0.1)
        tally.count_result(result(seq, finished_us=7000), seq * 0.1 + (0.9 if seq < 10 else 0.01))
    now = 10.0
    live, whole = tally.recent(now), tally.whole()
    assert live.age_largest_s == pytest.approx(0.01)
    assert whole.age_largest_s == pytest.approx(0.9)
    assert live.fps_in == pytest.approx(10, abs=1 / RECENT_S)
    assert whole.fps_in == pytest.approx(10)
    assert whole.server_p50_s == pytest.approx(0.007, rel=0.01)


def test_a_total_adds_counts_and_rates_and_takes_ages_of_all_frames() -> None:
    slow, fast = FrameCounts("slow"), FrameCounts("fast")
    for seq in range(10):
        slow.count_offered(seq, float(seq))
        slow.count_result(result(seq), seq + 0.5)
    for seq in range(90):
        fast.count_offered(seq, seq / 10)
        fast.count_result(result(seq), seq / 10 + 0.05)
    fast.count_offered(90, 9.0)
    fast.set_client_totals(1, 0)
    whole = FrameCounts.whole_of_all([slow, fast], "all")
    assert (whole.offered, whole.answered, whole.dropped) == (101, 100, 1)
    assert whole.age_p50_s == pytest.approx(0.05, rel=0.01)
    assert whole.age_p99_s == pytest.approx(0.5, rel=0.01)
    assert whole.fps_in == pytest.approx(11)
    live = FrameCounts.recent_of_all([slow, fast], "all", 9.5)
    assert (live.offered, live.age_p50_s, live.age_largest_s) == (101, pytest.approx(0.05), pytest.approx(0.5))


def view(rows: list[StreamFigures], **changes: object) -> TableView:
    latest = [(row.name, "espresso 0.95") for row in rows[:-1] or rows]
    return TableView("a title", rows, **{"latest": latest, "governor": "full speed", **changes})  # type: ignore[arg-type]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`draw(view, width, height)` returns the lines that a terminal of this size shows."""

    def drawn(shown: TableView, width: int, height: int) -> list[str]:
        for name, value in (("COLUMNS", width), ("LINES", height), ("TERM", "xterm-256color")):
            monkeypatch.setenv(name, str(value))
        output = Terminal()
        live = LiveView(output)
        live.draw(draw_table(shown, output, live.height))
        text = output.getvalue()
        live.erase()
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).splitlines()

    return drawn


@pytest.mark.parametrize("width", [1, 5, 20, 40, 79, 120, 300])
@pytest.mark.parametrize("height", [1, 3, 8, 24, 60])
@pytest.mark.parametrize("count", [1, 2, 4, 40])
def test_the_table_is_never_larger_than_the_terminal(
    draw: Callable[..., list[str]], width: int, height: int, count: int
) -> None:
    parts = [figures(f"caméra-{number}") for number in range(count)]
    rows = parts if count == 1 else [*parts, total(parts, "all", (0.1, 0.2, 0.3), 0.01)]
    lines = draw(view(rows, done=7, length=50, notes=["a note"]), width, height)
    assert len(lines) <= height
    assert all(cell_len(line) <= width for line in lines)


def test_a_narrow_terminal_shows_the_most_important_columns(
    draw: Callable[..., list[str]],
) -> None:
    wide, narrow, tiny = (draw(view([figures()]), width, 24)[1].split() for width in (200, 60, 20))
    assert "SERVER" in wide
    assert "OFFERED" in wide
    assert "SERVER" not in narrow
    assert "AGE" in narrow
    assert tiny == ["STREAM", "FPS", "OUT"]


def test_the_table_shows_rates_ages_and_counts() -> None:
    row = table([figures()])[2].split()
    assert row == ["cam", "30.0", "10.0", "50.0", "80.1", "250", "40.0", "100", "40", "0", "58", "2"]


def test_drops_are_shown_by_reason_and_side(draw: Callable[..., list[str]]) -> None:
    lines = [line.rstrip() for line in draw(view([figures()]), 200, 24)]
    assert "drops: newer 40, max-age 10, never sent 8" in lines
    assert "latest: espresso 0.95" in lines
    assert "governor: full speed" in lines


def test_the_streams_that_do_not_fit_are_in_the_total(draw: Callable[..., list[str]]) -> None:
    parts = [figures(f"cam-{number}") for number in range(30)]
    lines = draw(view([*parts, total(parts, "all", (0.1, 0.2, 0.3), 0.01)]), 120, 20)
    hidden = next(line.rstrip() for line in lines if "more streams" in line)
    shown = sum(line.startswith("cam-") and "espresso" not in line for line in lines)
    assert hidden == f"... and {30 - shown} more streams, in the total"
    assert any(line.startswith("all") and "3000" in line for line in lines)


@pytest.mark.parametrize("hostile", ["\x1b[2J\x1b[31m", "a\nb", "\x07", "\u202eabc", "\x9b31m"])
def test_untrusted_text_cannot_control_the_terminal(draw: Callable[..., list[str]], hostile: str) -> None:
    lines = draw(view([figures(hostile)], latest=[("cam", hostile)], governor=hostile, notes=[hostile]), 100, 24)
    told = "".join([*lines, plain_line(figures(hostile), hostile, 1.0), *summary([figures(hostile)])])
    assert all(char.isprintable() for char in told)


def test_progress_is_a_bar_if_the_length_is_known_else_a_clock(draw: Callable[..., list[str]]) -> None:
    half = draw(view([figures()], done=125, length=250, eta_s=65.0), 80, 24)[-1]
    assert half.rstrip().endswith("━  50%, 125/250, 1:05 left")
    assert draw(view([figures()], done=300, length=250), 80, 24)[-1].rstrip().endswith("━ 100%, 300/250")
    assert draw(view([figures()], done=99, passed_s=3725), 80, 24)[-1].rstrip() == (
        "1:02:05, 99 pictures; Ctrl-C ends it"
    )


def test_the_summary_accounts_for_every_frame() -> None:
    lines = summary([figures()])
    assert "offered 100 = answered 40 + dropped 58 + lost 2" in lines
    assert summary([figures(failed=3)])[-2].endswith("; 3 of the answers are errors")
    assert summary([figures(late=4)])[-2].endswith("; 4 of the answers were late")


def test_late_results_are_counted_for_each_stream_and_in_all() -> None:
    counts = FrameCounts("cam")
    for seq in range(3):
        counts.count_offered(seq, 0.0)
        late = result(seq)
        late.is_late = seq > 0
        counts.count_result(late, 1.0)
    assert (counts.whole().answered, counts.whole().late) == (3, 2)
    assert FrameCounts.whole_of_all([counts, counts], "all").late == 4


def test_a_plain_line_contains_the_summary() -> None:
    line = plain_line(figures(), "espresso 0.95", 12.0)
    assert line == (
        "  12.0 s  cam  in 30.0 fps  out 10.0 fps  age p50 50.0 p99 80.1 ms  "
        "dropped 58 (newer 40, max-age 10, never sent 8)  lost 2  espresso 0.95"
    )
