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
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edge_server.client import DropReason
from tests.kit.server import serve

pytestmark = pytest.mark.soak

REST_S = 60.0
"""Until a machine that lost its sensors works as before: the allowed fraction rises from 0.5 to 1, then a pause."""


@pytest.fixture(scope="module")
def models(heated_server: Any, module_repository: Any) -> Path:
    heated_server.write_models(module_repository)
    path: Path = module_repository.path
    return path


# -- pulling sensors


@dataclass
class LostSensor:
    """Observations of one sensor that was removed."""

    before: dict[str, Any]
    without: dict[str, Any]
    after: dict[str, Any]
    noticed_after_s: float
    statuses: list[int]


LOST = {
    "throttle alerts": "alert soc2-throttle-alert",
    "over-current alarms": "alarm oc1",
    "junction": "zone tj",
    "all zones": "temperature",
    "power rails": "power",
    "temperature": "temperature",
    "power": "power",
    "card": "temperature",
    "library": "temperature",
}
"""What is removed, and what is reported as lost then, at the latest: folders are removed one by one."""


def pull(
    heated_server: Any,
    server: Any,
    name: str,
    take_away: Callable[[], None],
    give_back: Callable[[], None],
    back_s: float = 10.0,
) -> LostSensor:
    """Take a sensor away under a server that works, until it is missed, and give it back, until nothing is."""
    statuses = []

    def wait_until(holds: Callable[[list[str]], bool], limit_s: float) -> tuple[dict[str, Any], float]:
        begun_s = time.monotonic()
        while True:
            statuses.append(heated_server.infer(server))
            fail_with, took_s = heated_server.governor(server), time.monotonic() - begun_s
            if holds(fail_with["sensors_lost"]) or took_s > limit_s:
                return fail_with, took_s
            time.sleep(0.05)

    before = heated_server.governor(server)
    take_away()
    without, noticed_after_s = wait_until(lambda lost: LOST[name] in lost, 10.0)
    give_back()
    return LostSensor(before, without, wait_until(lambda lost: not lost, back_s)[0], noticed_after_s, statuses)


class Folders:
    """Folders of a board that go and come back, as with their driver."""

    def __init__(self, board: Any, *folders: str) -> None:
        self._board = board
        self._folders = folders

    def remove(self) -> None:
        for folder in self._folders:
            self._board.remove(folder)

    def restore(self) -> None:
        for path in self._board.files:
            if path.startswith(tuple(f"{folder}/" for folder in self._folders)):
                self._board.restore(path)


def pull_files(heated_server: Any, server: Any, board: Any) -> dict[str, LostSensor]:
    parts = ("cpu", "gpu", "cv0", "cv1", "cv2", "soc0", "soc1", "soc2")
    zones = [board.zone(f"{part}-thermal") for part in (*parts, "tj")]
    alerts = [board.cooler(f"{part}-throttle-alert") for part in parts]
    folders = {
        "throttle alerts": alerts,
        "over-current alarms": [board.monitor("soctherm_oc")],
        "junction": [board.zone("tj-thermal")],
        "all zones": zones,
        "power rails": [board.monitor("ina3221")],
    }
    things = {name: Folders(board, *paths) for name, paths in folders.items()}
    pulled = {name: pull(heated_server, server, name, thing.remove, thing.restore) for name, thing in things.items()}
    end_s = time.monotonic() + REST_S
    while (fail_with := heated_server.governor(server))["state"] != "NORMAL" and time.monotonic() < end_s:
        time.sleep(0.2)
    pulled["in the end"] = LostSensor(fail_with, fail_with, fail_with, 0.0, [])
    return pulled


def pull_nvml(heated_server: Any, server: Any, nvidia: Any, fake: Any) -> dict[str, LostSensor]:
    def fail_with(code: int) -> Callable[[], None]:
        return lambda: nvidia.set(0, temperature0=fake.Error(code), power=fake.Error(code))

    def repair() -> None:
        nvidia.set(0, temperature0=50, power=20_000)

    def replace_driver() -> None:
        nvidia.set_init(fake.VERSION_MISMATCH)
        fail_with(fake.VERSION_MISMATCH)()

    # A lost card is found by reinitialising the library, every ten seconds.
    return {
        "temperature": pull(heated_server, server, "temperature", lambda: nvidia.set(0, temperature0=None), repair),
        "power": pull(heated_server, server, "power", lambda: nvidia.set(0, power=fake.Error(fake.TIMEOUT)), repair),
        "card": pull(heated_server, server, "card", lambda: nvidia.lose(0), lambda: nvidia.give_back(0), 20.0),
        "library": pull(heated_server, server, "library", replace_driver, repair, 0.0),
    }


# -- all of it at the same time: simulated heat costs waiting, not computing


Work = Callable[[Any, Any], Any]


@dataclass
class Resources:
    """Resources of the runs. Boards and folders are created by the test's thread."""

    heated_server: Any
    serve: Any
    models: Path
    folder: Path
    boards: Any
    fake: Any
    cleanup: contextlib.ExitStack

    def board(self, name: str, run: str) -> Any:
        made = self.boards.Board(name, self.folder / run)
        self.cleanup.callback(made.close)
        return made

    def card(self, run: str, **metrics: int) -> Any:
        nvidia = self.fake.FakeNvml(self.folder / f"{run}.gpus")
        nvidia.add_gpu(**metrics)
        return nvidia

    def run(self, work: Work, sensed: Any, root: Path, environment: Any = None, *more: str) -> Any:
        """Return the result of `work` on a server and its sensors."""
        flags = (f"--sysfs-root={root}", *self.heated_server.FLAGS, *more)
        with self.serve(self.models, *flags, environment=environment) as server:
            outcome = work(server, sensed)
            server.stop_cleanly()
            return outcome


@pytest.fixture(scope="module")
def resources(
    heated_server: Any, models: Path, boards: Any, fake_nvml: Any, tmp_path_factory: Any
) -> Iterator[Resources]:
    with contextlib.ExitStack() as cleanup:
        yield Resources(heated_server, serve, models, tmp_path_factory.mktemp("boxes"), boards, fake_nvml, cleanup)


@pytest.fixture(scope="module")
def runs(resources: Resources, heated_server: Any, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Any]]]:
    """Everything that runs, begun at once; results by name. Without a C compiler there are none of NVML."""
    loop, pulled = resources.board("orin_nano_jp6", "loop"), resources.board("orin_nano_jp6", "pulled")
    work = {
        "files": partial(resources.run, heated_server.run_loop, heated_server.Module(loop), loop.root),
        "pulled files": partial(resources.run, partial(pull_files, heated_server), pulled, pulled.root),
    }
    with contextlib.suppress(pytest.skip.Exception):
        library = request.getfixturevalue("nvidia_library")
        # A machine whose only sensor is the card.
        bare = resources.board("", "bare").root
        card, other = resources.card("card"), resources.card("pulled card")
        work["nvml"] = partial(
            resources.run, heated_server.run_loop, heated_server.Card(card), bare, card.environment(library)
        )
        pulling = partial(pull_nvml, heated_server, fake=resources.fake)
        work["pulled nvml"] = partial(resources.run, pulling, other, bare, other.environment(library))
    with ThreadPoolExecutor(len(work)) as pool:
        yield {name: pool.submit(run) for name, run in work.items()}


def result_of(runs: dict[str, Future[Any]], name: str) -> Any:
    if name not in runs:
        pytest.skip("needs a C compiler for the library that stands in for NVIDIA's")
    return runs[name].result()


@pytest.fixture(params=["files", "nvml"])
def outcome(request: pytest.FixtureRequest, runs: dict[str, Future[Any]]) -> Any:
    """The Outcome of a closed loop."""
    return result_of(runs, request.param)


def test_the_temperature_stays_within_two_and_a_half_degrees_of_the_set_point(outcome: Any) -> None:
    errors = [point.chip_c - outcome.machine.set_point_c for point in outcome.settled]
    assert outcome.report["set_point_c"] == outcome.machine.set_point_c
    assert max(map(abs, errors)) <= 2.5, errors
    assert max(point.share for point in outcome.settled) < 1.0, "it is the governor that holds it there"


def test_the_trip_temperature_is_never_reached_after_two_minutes(heated_server: Any, outcome: Any) -> None:
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


def test_the_allowed_rate_recovers_without_oscillation(heated_server: Any, outcome: Any) -> None:
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


# -- sensors that go and come back


@pytest.mark.parametrize("sensor", LOST)
def test_a_lost_sensor_is_reported_within_five_seconds_and_again_when_it_is_back(
    runs: dict[str, Future[Any]], sensor: str
) -> None:
    run = "pulled nvml" if sensor in ("temperature", "power", "card", "library") else "pulled files"
    pulled: LostSensor = result_of(runs, run)[sensor]
    assert pulled.before["sensors_lost"] == []
    assert "sensor_lost" not in pulled.before["causes"]
    assert pulled.noticed_after_s <= 5.0
    assert LOST[sensor] in pulled.without["sensors_lost"]
    assert pulled.without["state"] != "NORMAL"
    assert "sensor_lost" in pulled.without["causes"]
    assert f"no reading of {pulled.without['sensors_lost'][0]}" in pulled.without["detail"]
    # A library older than its driver stays so until the process ends.
    assert pulled.after["sensors_lost"] == ([] if sensor != "library" else pulled.without["sensors_lost"])
    assert set(pulled.statuses) == {200}, "control is served all the while"


def test_a_machine_with_all_sensors_back_works_as_before(runs: dict[str, Future[Any]]) -> None:
    fail_with = result_of(runs, "pulled files")["in the end"].after
    assert (fail_with["state"], fail_with["share"], fail_with["causes"]) == ("NORMAL", 1.0, ["power_mode"])


def test_without_a_governor_a_hot_machine_serves_at_full_rate_and_reads_no_sensor(
    resources: Resources, heated_server: Any, nvidia_library: Path
) -> None:
    board, nvidia = resources.board("orin_nano_jp6", "ungoverned"), resources.card("ungoverned", temperature0=97)
    board.set_temperature("tj-thermal", 103.0)

    def work(server: Any, _: Any) -> None:
        assert heated_server.governor(server)["enabled"] is False
        for caller in (
            heated_server.HttpCaller(server, heated_server.BULK),
            heated_server.GrpcCaller(server, heated_server.BULK),
        ):
            with contextlib.closing(caller):
                assert {caller.ask() for _ in range(20)} == {("ok", "")}
        page = server.read_metrics()
        assert "edge_governor_" not in page
        assert "edge_shed_" not in page
        assert nvidia_library.name not in Path(f"/proc/{server.process.pid}/maps").read_text()

    resources.run(work, board, board.root, nvidia.environment(nvidia_library), "--governor=false")
