"""The newest version on trial: its exact share of the requests, and its fall when it leaves the band."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from edge_server.core.model_spec import InputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError
from edge_server.serving.lifecycle.canary import CanaryTerms, CanaryTrial, ResultSummary, judge
from tests.kit.eventually import eventually

SHARE = {"canary_share": "0.25", "canary_min_requests": "20", "canary_max_p99_ratio": "1000000"}
"""The ratio is out of reach: what the machine does beside the test must not decide it."""


def both(core: Any, parameters: dict[str, str] | None = None, mark: str = "a") -> None:
    core.load(core.spec(parameters=SHARE if parameters is None else parameters), 1, 2, mark=mark)


def ask(core: Any, count: int, **more: Any) -> Counter[int]:
    return Counter(core.submit(1.0, **more)[1].final().version for _ in range(count))


def shares(core: Any) -> dict[int, float]:
    return {report.version: report.share for report in core.router.versions("m") if report.state == "READY"}


def fail_version(core: Any, version: int) -> None:
    """Let the sessions of one version fail. They are distinguished by the order in which they were opened: 2, then
    1."""
    failing = f"v{version}"
    plain = core.script.on_run

    def run(name: str, inputs: Any) -> Any:
        if threading.current_thread() in core.threads_of[failing]:
            raise BackendError("failed as told")
        return plain(name, inputs)

    core.script.on_run = run


@pytest.fixture
def trial_house(core: Any) -> Any:
    core.threads_of = {"v1": set(), "v2": set(), "v3": set()}
    core.script.on_open = lambda job: core.threads_of[f"v{job.file.version}"].add(threading.current_thread())
    return core


def test_the_canary_takes_its_exact_share_of_the_requests_without_a_version(core: Any) -> None:
    both(core)
    assert shares(core) == {1: 0.75, 2: 0.25}
    assert ask(core, 400) == {1: 300, 2: 100}
    assert ask(core, 10, version=2) == {2: 10}
    assert {item.version: item.success.count for item in core.service.statistics("m", None)} == {1: 300, 2: 110}
    assert {report.version: report.served_count for report in core.router.versions("m")} == {1: 300, 2: 110}


def test_questions_about_the_model_do_not_count_as_requests(core: Any) -> None:
    both(core, SHARE | {"canary_share": "0.5"})
    seen: Counter[int] = Counter()
    for _ in range(20):
        core.service.find("m", None)
        seen += ask(core, 1)
    assert seen == {1: 10, 2: 10}
    assert core.router.route("m", None).version == 1, "the model is what the version before the canary says"


@pytest.mark.parametrize(("share", "expected"), [("0", {1: 50}), ("1", {2: 50}), ("0.1", {1: 45, 2: 5})])
def test_shares_of_every_size(core: Any, share: str, expected: dict[int, int]) -> None:
    both(core, SHARE | {"canary_share": share})
    assert ask(core, 50) == expected


def test_the_only_version_takes_everything_whatever_its_share(core: Any) -> None:
    core.load(core.spec(parameters=SHARE), 2)
    assert ask(core, 8) == {2: 8}
    assert shares(core) == {2: 1.0}


def test_without_the_parameter_the_newest_takes_everything(core: Any) -> None:
    both(core, {})
    assert shares(core) == {1: 0.0, 2: 1.0}


def test_a_canary_that_fails_too_often_falls_back_and_says_so(trial_house: Any) -> None:
    core = trial_house
    both(core)
    fail_version(core, 2)
    answers = [core.submit(1.0)[1].final() for _ in range(100)]
    failed = [answer for answer in answers if answer.error is not None]
    # With 20 requests needed, a second failure already exceeds 5 % of them.
    assert [answer.version for answer in failed] == [2, 2]
    assert shares(core) == {1: 1.0, 2: 0.0}
    (event,) = [fields for kind, fields in core.events if kind == "model.canary_failed"]
    assert (event["version"], "requests failed" in event["reason"]) == (2, True)
    (row,) = [entry for entry in core.router.index() if entry.version == "2"]
    assert row.state == "READY"
    assert row.reason.startswith("takes only requests that name it, the canary fell back: 2 of its latest 2 requests")
    (report,) = [report for report in core.router.versions("m") if report.version == 2]
    assert report.reason == row.reason
    assert not core.router.has_failures()
    assert core.submit(1.0, version=2)[1].final().version == 2


def test_a_new_generation_is_tried_anew(trial_house: Any) -> None:
    core = trial_house
    both(core)
    plain = core.script.on_run
    fail_version(core, 2)
    for _ in range(40):
        core.submit(1.0)[1].final()
    assert shares(core) == {1: 1.0, 2: 0.0}
    core.script.on_run = plain
    both(core, mark="b")
    assert shares(core) == {1: 0.75, 2: 0.25}
    assert ask(core, 40) == {1: 30, 2: 10}


def test_failures_that_both_versions_share_are_not_held_against_the_canary(trial_house: Any) -> None:
    core = trial_house
    both(core, SHARE | {"canary_share": "0.5", "canary_min_requests": "5"})
    core.script.on_run = lambda name, inputs: {}
    for _ in range(4):
        core.submit(1.0, version=1)[1].final()
    ask(core, 60)
    assert shares(core) == {1: 0.5, 2: 0.5}


def test_wrong_requests_are_not_held_against_the_canary(core: Any) -> None:
    both(core, {"canary_share": "1", "canary_min_requests": "1"})
    for _ in range(20):
        with pytest.raises(Exception, match="batch-size"):
            core.submit(1.0, rows=99)
    assert shares(core) == {1: 0.0, 2: 1.0}


def test_a_canary_with_other_inputs_than_its_predecessor_takes_no_requests_for_it(core: Any) -> None:
    core.load(core.spec(parameters=SHARE), 1)
    other = core.spec(parameters=SHARE, inputs=(InputSpec("IN", DType.FP32, (2,)),))
    wish = {1: core.desired_version(core.spec(parameters=SHARE), 1), 2: core.desired_version(other, 2)}
    core.table.set_desired(type(core.desired["m"])("m", wish))
    assert core.table.wait_settled(["m"], 20)
    assert shares(core) == {1: 1.0, 2: 0.0}
    assert "its inputs differ" in {entry.version: entry.reason for entry in core.router.index()}["2"]
    assert eventually(lambda: "model.canary_failed" in [kind for kind, _ in core.events])


BAD = [("canary_share", "1.5"), ("canary_share", "ten"), ("canary_max_p99_ratio", "0.5"), ("canary_min_requests", "0")]


@pytest.mark.parametrize(("key", "text"), BAD)
def test_terms_that_make_no_sense_fail_the_load(core: Any, key: str, text: str) -> None:
    core.set_desired(core.spec(parameters={"canary_share": "0.1", key: text}))
    assert core.table.wait_settled(["m"], 20)
    assert f"parameter {key} must be a number of" in core.router.failure("m")


MS = 1_000_000
TERMS = CanaryTerms(0.1, min_requests=100)
VERDICTS = [
    ("too few to tell", ResultSummary(99, 0, 90 * MS), ResultSummary(500, 0, 10 * MS), None),
    ("too few of the other", ResultSummary(500, 0, 90 * MS), ResultSummary(99, 0, 10 * MS), None),
    ("just as slow as allowed", ResultSummary(500, 0, 20 * MS), ResultSummary(500, 0, 10 * MS), None),
    (
        "twice as slow, but what is a millisecond",
        ResultSummary(500, 0, MS + MS // 2),
        ResultSummary(500, 0, MS // 2),
        None,
    ),
    ("slower than that", ResultSummary(500, 0, 21 * MS), ResultSummary(500, 0, 10 * MS), "p99 latency of 21.0 ms"),
    ("as many failures as allowed", ResultSummary(100, 5, 10 * MS), ResultSummary(500, 0, 10 * MS), None),
    ("one more", ResultSummary(100, 6, 10 * MS), ResultSummary(500, 0, 10 * MS), "6 of its latest 100 requests failed"),
    (
        "enough failures before there are enough requests",
        ResultSummary(6, 6, 0),
        ResultSummary(0, 0, 0),
        "6 of its latest 6",
    ),
    ("the other fails as well", ResultSummary(100, 30, MS), ResultSummary(100, 26, MS), None),
    ("the other answers nothing", ResultSummary(100, 0, MS), ResultSummary(100, 100, 0), None),
]


@pytest.mark.parametrize(("what", "canary", "stable", "message"), VERDICTS, ids=[row[0] for row in VERDICTS])
def test_the_band(what: str, canary: ResultSummary, stable: ResultSummary, message: str | None) -> None:
    said = judge(TERMS, canary, stable)
    assert said is None if message is None else message in str(said)


class Told:
    version, generation = 1, 1

    def __init__(self, core: Any) -> None:
        self.spec = core.spec()
        self.observer: Any = None

    def observe(self, observer: Any) -> None:
        self.observer = observer


def test_a_slow_canary_falls_once_and_is_watched_no_more(core: Any) -> None:
    canary, stable = Told(core), Told(core)
    said: list[str] = []
    trial = CanaryTrial(CanaryTerms(0.5, min_requests=64), canary, stable, lambda trial, reason: said.append(reason))
    trial.begin()
    for _ in range(100):
        stable.observer(10 * MS)
        canary.observer(25 * MS)
    assert len(said) == 1
    assert "more than 2 times" in said[0]
    trial.end()
    assert (canary.observer, stable.observer) == (None, None)
