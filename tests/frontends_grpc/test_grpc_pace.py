"""The rule that says which thread computes a stream's next request."""

from __future__ import annotations

from edge_server.frontends.grpc.pace import QUICK_S, Pace

SLOW_S = QUICK_S * 10


def slow_pace() -> Pace:
    pace = Pace()
    while pace.is_quick:
        pace.may_run(True)
        pace.answered(SLOW_S)
    return pace


def test_quick_models_run_on_the_reading_thread_however_the_client_sends() -> None:
    pace = Pace()
    for is_idle in (True, False, False, True):
        assert pace.may_run(is_idle)
        pace.answered(QUICK_S / 2)


def test_a_slow_model_of_a_client_that_sends_ahead_never_holds_up_reading() -> None:
    pace = slow_pace()
    decisions = []
    for _ in range(60):
        decisions.append(pace.may_run(False))
        pace.answered(None)
    assert not any(decisions)


def test_a_slow_model_of_a_client_that_waits_runs_on_the_reading_thread_most_of_the_time() -> None:
    pace = slow_pace()
    decisions = []
    for _ in range(100):
        decisions.append(pace.may_run(True))
        pace.answered(SLOW_S if decisions[-1] else None)
    assert 80 <= sum(decisions) < 100


def test_a_client_that_begins_to_send_ahead_is_noticed_soon() -> None:
    pace = slow_pace()
    for _ in range(30):
        pace.answered(SLOW_S if pace.may_run(True) else None)
    # From now on the stream is idle exactly after a request that ran here.
    ran = True
    decisions = []
    for _ in range(60):
        ran = pace.may_run(ran)
        pace.answered(SLOW_S if ran else None)
        decisions.append(ran)
    assert sum(decisions[20:]) <= 1


def test_one_thread_is_enough_again_after_a_while_of_quick_answers() -> None:
    pace = Pace()
    pace.may_run(False)
    pace.answered(None)
    count = 0
    while not pace.may_be_alone:
        pace.may_run(True)
        pace.answered(QUICK_S / 2)
        count += 1
    assert 10 < count < 100
    pace.answered(SLOW_S)
    assert not pace.may_be_alone


def test_a_single_slow_run_changes_nothing() -> None:
    pace = Pace()
    for i in range(100):
        assert pace.may_run(False)
        pace.answered(SLOW_S if i % 3 == 0 else QUICK_S / 2)
    assert pace.is_quick


def test_a_model_that_became_quick_is_found_out_even_when_requests_are_sent_ahead() -> None:
    pace = slow_pace()
    count = 0
    while not pace.is_quick:
        pace.answered(QUICK_S / 2 if pace.may_run(False) else None)
        count += 1
    assert count < 500
