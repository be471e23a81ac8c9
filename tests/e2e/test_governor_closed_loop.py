"""The governor in closed loop: the installed server, and sensors of a simulated machine that the server heats.

Real here: the server's process, its sensors reading files or the real pynvml, the control policy, admission control,
HTTP and gRPC clients with their own connections, and the work, whose computing time is read from the server's
statistics several times a second. Simulated: the heat of this work. Models are stubs that wait, so that their computing
time does not depend on other load of the machine; a shared resource of the rate limiter lets one of them run at a time,
as on one GPU.

Time: the control policy uses real seconds and its normal constants. The simulated heat sink is TIME times lighter
than a real one and so warms as much in a second as that does in TIME seconds: this is *simulated* time. Its
chip is lighter too; so the control policy has less time to settle than on a real machine.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edge_server.client import DropReason
from tests.e2e import heated_server
from tests.kit.server import serve

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def make_board(boards: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    with contextlib.ExitStack() as stack:
        yield lambda name: stack.enter_context(
            contextlib.closing(boards.Board(name, tmp_path_factory.mktemp("board") / "files"))
        )


@pytest.fixture(scope="module")
def models(module_repository: Any) -> Path:
    heated_server.write_models(module_repository)
    return Path(module_repository.path)


@pytest.fixture(scope="module")
def runs(
    make_board: Any, models: Path, fake_nvml: Any, tmp_path_factory: Any, request: pytest.FixtureRequest
) -> Iterator[dict[str, Future[Any]]]:
    """Both loops, begun at once, as simulated heat costs waiting and not computing. Without a C compiler there is none
    of NVML."""

    def run(machine: Any, root: Path, environment: dict[str, str]) -> Any:
        with serve(models, f"--sysfs-root={root}", *heated_server.FLAGS, environment=environment) as server:
            outcome = heated_server.run_loop(server, machine)
            server.stop_cleanly()
            return outcome

    board = make_board("orin_nano_jp6")
    work = {"files": partial(run, heated_server.jetson(board), board.root, {})}
    with contextlib.suppress(pytest.skip.Exception):
        # A machine whose only sensor is the card.
        nvidia = fake_nvml.FakeNvml(tmp_path_factory.mktemp("card") / "gpus")
        nvidia.add_gpu()
        environment = nvidia.environment(request.getfixturevalue("nvidia_library"))
        work["nvml"] = partial(run, heated_server.card(nvidia), make_board("").root, environment)
    with ThreadPoolExecutor(len(work)) as pool:
        yield {name: pool.submit(run) for name, run in work.items()}


@pytest.fixture(params=["files", "nvml"])
def outcome(request: pytest.FixtureRequest, runs: dict[str, Future[Any]]) -> Any:
    """The Outcome of a closed loop."""
    if request.param not in runs:
        pytest.skip("needs a C compiler for the library that stands in for NVIDIA's")
    return runs[request.param].result()


def test_the_temperature_stays_within_two_and_a_half_degrees_of_the_set_point(outcome: Any) -> None:
    errors = [point.chip_c - outcome.machine.set_point_c for point in outcome.settled]
    assert outcome.report["set_point_c"] == outcome.machine.set_point_c
    assert max(map(abs, errors)) <= 2.5, errors
    assert max(point.share for point in outcome.settled) < 1.0, "it is the governor that holds it there"


def test_the_trip_temperature_is_never_reached_after_two_minutes(outcome: Any) -> None:
    later = outcome.between(heated_server.BEGUN_S, float("inf"))
    assert max(point.chip_c for point in later) < outcome.machine.constants.trip_c
    assert not {point.state for point in later} & {"THROTTLED", "CRITICAL"}


def test_control_is_answered_in_time(outcome: Any) -> None:
    control = outcome.of("control")
    in_time = sum(answer.is_in_time for answer in control)
    assert len(control) > 100
    assert in_time >= 0.99 * len(control), Counter(answer.word for answer in control)


def test_every_response_is_a_result_or_a_refusal_with_reason_and_retry_time(outcome: Any) -> None:
    assert {answer.word for answer in outcome.load.answers} <= {"ok", "shed", "late"}


def test_the_server_counts_refusals_per_class_as_its_clients_do(outcome: Any) -> None:
    seen = Counter(answer.class_name for answer in outcome.load.answers if answer.word == "shed")
    seen["bulk"] += sum(drop.reason is DropReason.GOVERNOR for camera in outcome.load.cameras for drop in camera.drops)
    assert outcome.shed() == seen
    assert seen["control"] == 0, "it asks for less than its floor"
    assert seen["bulk"] > 0


def test_the_lowest_priority_class_is_shed_first(outcome: Any) -> None:
    def shed_fraction(name: str) -> float:
        words = [answer.word for answer in outcome.of(name)]
        return words.count("shed") / len(words)

    assert shed_fraction("control") == 0.0
    assert shed_fraction("normal") < shed_fraction("bulk")


def test_the_lighter_variant_takes_over_once_and_is_reported(outcome: Any) -> None:
    in_force = [point.lighter for point in outcome.trace]
    changes = sum(before != after for before, after in zip(["", *in_force], in_force, strict=False))
    assert changes <= 1
    fail_with = {answer.variant for answer in outcome.load.answers if answer.word == "ok"}
    assert fail_with == {"", "detector_small"} if changes else {""}


def test_the_allowed_rate_recovers_without_oscillation(outcome: Any) -> None:
    shares = [point.share for point in outcome.between(heated_server.STEP_S + 2.0, float("inf"))]
    highest = 0.0
    for share in shares:
        assert share >= highest - heated_server.NOISE, shares
        highest = max(highest, share)
    assert shares[-1] == 1.0


def test_all_cameras_get_evenly_fewer_frames_and_the_reason(outcome: Any) -> None:
    answered = []
    for camera in outcome.load.cameras:
        refused = [drop for drop in camera.drops if drop.reason is DropReason.GOVERNOR]
        assert len(refused) > 10
        assert all("the box is " in drop.detail and ": " in drop.detail for drop in refused)
        answered.append(len(camera.results))
    assert min(answered) > 0.65 * max(answered), answered
