"""A fleet of boxes gets good releases in waves and under load, and no bad one beyond its first wave."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.server import serve

pytest.importorskip("tuf")

from tests.e2e.boxes import bad_releases
from tests.e2e.boxes.fleet_of_boxes import Box, Fleet, Load, write_model

BAD_RELEASES: dict[str, tuple[Callable[[Fleet], None], str]] = {
    "slow": (bad_releases.publish_slow, "more than 10 times"),
    "wrong outputs": (bad_releases.publish_wrong, "output 'Y' differs from the expected ones"),
    "broken": (bad_releases.publish_broken, "it cannot be loaded"),
    "damaged on the web server": (bad_releases.publish_damaged, "other bytes than those that were signed"),
    "larger than the disk": (bad_releases.publish_larger_than_the_disk, "does not fit on the disk"),
}
"""Kind -> what publishes it, and a part of the reason that the boxes give."""
BAD_SITES: dict[str, tuple[Callable[[Fleet], Path], str]] = {
    "expired": (bad_releases.site_that_expired, "timestamp.json is expired"),
    "replayed": (bad_releases.site_that_is_replayed, "is not trusted"),
    "signed by a thief": (bad_releases.site_of_a_thief, "was signed by 0/1 keys"),
    "signed by a thief who has `online.pem`": (
        bad_releases.site_of_a_thief_with_the_online_key,
        "was signed by 0/1 keys",
    ),
}
"""Kind -> what returns the site, and a part of the reason that the boxes give."""
ROLLOUT = """
waves = ["box-01", "{percent} %", "all"]
tolerance = 0.01
max_slowdown = 10
"""


LONG = [pytest.mark.long, pytest.mark.timeout(1500)]


@pytest.mark.parametrize(
    ("count", "interval_s", "percent", "loaded", "pause_s", "is_over_mqtt"),
    [
        # Four minutes of processor time; test_follow.py has a good and a bad release with two boxes.
        pytest.param(6, 1, 40, 4, 0.05, False, marks=LONG, id="six"),
        pytest.param(50, 4, 10, 20, 0.02, False, marks=LONG, id="fifty"),
        pytest.param(50, 4, 10, 20, 0.02, True, marks=LONG, id="fifty_over_mqtt"),
    ],
)
def test_good_releases_reach_all_boxes_and_bad_ones_the_first_wave_at_most(
    count: int,
    interval_s: int,
    percent: int,
    loaded: int,
    pause_s: float,
    is_over_mqtt: bool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    broker = f"mqtt://127.0.0.1:{request.getfixturevalue('broker').port}" if is_over_mqtt else ""
    fleet = Fleet(tmp_path, count, interval_s, ROLLOUT.format(percent=percent), serve, broker)
    with fleet.running(count - 1):
        loaded_boxes, offline, late = fleet.boxes[:loaded], fleet.boxes[-2], fleet.boxes[-1]
        with Load([box.server for box in loaded_boxes], pause_s) as load:
            offline.stop()
            table = [*release_to_all(fleet, "m/2", 2.0)]
            offline.start()
            late.start()
            fleet.list_boxes()
            caught_up_s = fleet.wait(lambda: have(fleet.boxes, "m/2.json"))
            table.append(f"| good, one box that was offline and one new, after {caught_up_s:.0f} s | 2 | 2 | | | |")
            for number, (kind, (publish, reason)) in enumerate(BAD_RELEASES.items(), 3):
                table.append(bad_release(fleet, kind, f"m/{number}", publish, reason))
            for kind, (make_site, reason) in BAD_SITES.items():
                table.append(bad_site(fleet, kind, make_site, reason))
            last = len(BAD_RELEASES) + 3
            table += release_to_all(fleet, f"m/{last}", 3.0)
        table.append(f"{load.answers.total()} requests of tritonclient, by their answers: {dict(load.answers)}")
        heads = ("kind", "boxes that it reached", "that have it after", "s until gone", "s until named", "reason")
        print("", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", *table, sep="\n")
        assert set(load.answers) == {"1", "2", "3"}


def release_to_all(fleet: Fleet, release: str, factor: float) -> Iterator[str]:
    """Publish a good release and lead it through its waves. Yield a line for each wave."""
    write_model(fleet.publisher.model, factor)
    fleet.publisher.publish()
    begin_s = time.monotonic()
    for wave in (1, 2, 3):
        # The boxes themselves are asked at first: it costs less than a command.
        fleet.wait(lambda wave=wave: is_wave_complete(fleet, release, wave))  # type: ignore[misc]
        fleet.wait(lambda wave=wave: is_installed_in_wave(fleet, release, wave))  # type: ignore[misc]
        boxes = sum(box.installed() == f"{release}.json" for box in fleet.up)
        yield f"| good, wave {wave}, after {time.monotonic() - begin_s:.0f} s | {boxes} | {boxes} | | | |"
        if wave < 3:
            assert f"{release}: wave {wave + 1} of 3" in fleet.publisher.lead("continue")[1]
    assert have(fleet.up, f"{release}.json")


def is_wave_complete(fleet: Fleet, release: str, wave: int) -> bool:
    """Whether each box to which the wave gives the release serves it, and box-01 has seen the wave."""
    states = [box.report()["models"]["m"] for box in fleet.up]
    wanting = [state for state in states if state["wanted"] == f"{release}.json"]
    is_seen = states[0]["wave"] == f"{wave} of 3" and (wave < 3 or len(wanting) == len(states))
    return is_seen and all(state["state"] == "installed" for state in wanting)


def is_installed_in_wave(fleet: Fleet, release: str, wave: int) -> bool:
    _, output = fleet.publisher.lead("status")
    row = next(line for line in output.splitlines() if line.startswith(f"{release} "))
    assert f"{wave} of 3" in row
    installed, waiting, failed = row.split()[-3:]
    assert failed == "0", output
    return int(installed) > 0 and waiting == "0"


def bad_release(fleet: Fleet, kind: str, release: str, publish: Callable[[Fleet], None], reason: str) -> str:
    """Publish a bad release and try to lead it on, until it is rolled back. Return a line of the table."""
    before = {box.name: box.installed() for box in fleet.boxes}
    publish(fleet)
    given = ""

    def is_reported() -> bool:
        nonlocal given
        output = fleet.publisher.lead("continue")[1]
        assert "wave 2" not in output
        lines = [line for line in output.splitlines() if line.startswith(release) and " on box-" in line]
        given = lines[0].partition(": ")[2] if lines else ""
        return reason in given

    reported_s = fleet.wait(lambda: reason in fleet.boxes[0].report()["models"]["m"]["reason"])
    fleet.wait(is_reported)
    # All boxes look again, and `continue` leads it no further.
    now_s = time.time()
    fleet.wait(lambda: all(box.report()["checked_s"] > now_s for box in fleet.boxes))
    assert is_reported()
    reached = [box.name for box in fleet.boxes if box.report()["models"]["m"]["wanted"] == f"{release}.json"]
    assert reached == ["box-01"]
    fleet.publisher.lead("rollback", "--model=m")
    gone_s = fleet.wait(lambda: all(is_content(box, f"{release}.json") for box in fleet.boxes))
    assert {box.name: box.installed() for box in fleet.boxes} == before
    # A report over MQTT comes up to a second after the box's own.
    fleet.wait(lambda: fleet.publisher.lead("status")[0] == 0, 30)
    left = sum(box.installed() == f"{release}.json" for box in fleet.boxes)
    return f"| {kind} | {len(reached)} | {left} | {gone_s:.0f} | {reported_s:.0f} | {given} |"


def bad_site(fleet: Fleet, kind: str, make_site: Callable[[Fleet], Path], reason: str) -> str:
    """Let the boxes see a site that the publisher did not sign so. Return a line of the table."""
    before = {box.name: box.installed() for box in fleet.boxes}
    wanted = {box.name: box.report()["models"]["m"]["wanted"] for box in fleet.boxes}
    fleet.site.folder = make_site(fleet)
    reported_s = fleet.wait(lambda: all(reason in box.report()["problem"] for box in fleet.boxes))
    given: list[str] = []

    def is_reported_by_all() -> bool:
        nonlocal given
        code, output = fleet.publisher.lead("status")
        given = [line for line in output.splitlines() if reason in line]
        return code == 1 and len(given) == len(fleet.boxes)

    fleet.wait(is_reported_by_all, 30)
    assert {box.name: box.installed() for box in fleet.boxes} == before
    assert {box.name: box.report()["models"]["m"]["wanted"] for box in fleet.boxes} == wanted
    write_model(fleet.publisher.model, 2.0)
    # A thief who could sign what is newest has used the next numbers of all metadata: a change makes later ones.
    rollout = fleet.publisher.rollout
    fleet.publisher.rollout += "max_latency_ms = 10000"
    fleet.publisher.publish()
    fleet.publisher.rollout = rollout
    fleet.publisher.publish()
    fleet.site.folder = fleet.publisher.site
    gone_s = fleet.wait(lambda: not any(box.report()["problem"] for box in fleet.boxes))
    words = given[0].partition(": ")[2].replace(fleet.site.url, "https://...")
    return f"| {kind} | 0 | 0 | {gone_s:.0f} | {reported_s:.0f} | {words} |"


def is_content(box: Box, withdrawn: str) -> bool:
    state = box.report()["models"].get("m")
    return state is not None and state["wanted"] != withdrawn and state["state"] == "installed"


def have(boxes: list[Box], release: str) -> bool:
    return all(box.installed() == release and is_content(box, "") for box in boxes)
