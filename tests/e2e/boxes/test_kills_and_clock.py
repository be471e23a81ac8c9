"""A box whose server is killed at each step of an update, and one that starts with a clock of long ago."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http

from tests.kit.infer_input import infer_input
from tests.kit.server import serve

pytest.importorskip("tuf")

from edge_server.plugins.fleet.follow.installed_models import FOLDER
from tests.e2e.boxes.fleet_of_boxes import Box, Fleet, Publisher, Site, write_model
from tests.e2e.test_wall_clock_jumps import DAY, WallClock

_FILLER_BYTES = 1_000_000


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    made = Publisher(tmp_path, "tolerance = 0.01")
    publish(made, 1.0)
    return made


@pytest.fixture
def site(publisher: Publisher) -> Iterator[Site]:
    with Site(publisher.site) as site:
        yield site


@pytest.fixture
def make_box(tmp_path: Path, publisher: Publisher, site: Site) -> Callable[..., Box]:
    def make(**more: Any) -> Box:
        (tmp_path / "box").mkdir(exist_ok=True)
        flags = (
            f"--follow={site.url}", f"--follow-root={publisher.site / 'metadata' / '1.root.json'}", "--box-id=box-01",
            "--follow-interval-secs=1", "--follow-max-kbytes-per-sec=1000",
        )  # fmt: skip
        return Box(tmp_path / "box", "box-01", lambda: serve(tmp_path / "box", *flags, **more))

    return make


def publish(publisher: Publisher, factor: float) -> None:
    write_model(publisher.model, factor)
    (publisher.model / "notes.bin").write_bytes(np.random.default_rng(int(factor)).bytes(_FILLER_BYTES))
    publisher.publish()


def answer(box: Box) -> float:
    tensor = infer_input(tritonclient.http, "X", np.ones((1, 4), np.float32))
    with tritonclient.http.InferenceServerClient(box.address) as client:
        return float(client.infer("m", [tensor]).as_numpy("Y")[0, 0])


def is_on_probation(box: Box) -> bool:
    return bool(json.loads((box.folder / FOLDER / "state.json").read_bytes())["probations"])


STEPS: dict[str, Callable[[Box, str], bool]] = {
    "download": lambda box, release: any((box.folder / FOLDER / "parts").glob("*.part")),
    "files put together": lambda box, release: (box.folder / FOLDER / "staged" / "m").exists(),
    "trial": lambda box, release: (box.folder / FOLDER / "trial" / "m").exists(),
    "exchange": lambda box, release: is_on_probation(box),
    "load": lambda box, release: box.installed() == release,
    "served": lambda box, release: box.installed() == release and not is_on_probation(box),
}
"""Step -> whether a box has come to it with a release."""


# Trials of a release have the lowest priority: on a busy machine they wait for all others.
@pytest.mark.soak
@pytest.mark.timeout(800)
def test_a_server_that_is_killed_at_any_step_serves_the_old_or_the_new_release_and_then_the_new_one(
    publisher: Publisher, make_box: Callable[..., Box]
) -> None:
    box = make_box()
    box.start()
    Fleet.wait(lambda: box.installed() == "m/1.json" and not is_on_probation(box))
    for number, (step, has_come) in enumerate(STEPS.items(), 2):
        publish(publisher, float(number))
        release = f"m/{number}.json"
        end_s = time.monotonic() + 60
        while not has_come(box, release):
            assert time.monotonic() < end_s, f"{step}: {box.report()}"
            time.sleep(0.001)
        box.server.stop(signal.SIGKILL)
        box.stop()
        assert box.installed() in ("", f"m/{number - 1}.json", release), step
        box.start()
        assert answer(box) in (number - 1, number), step
        Fleet.wait(lambda release=release: box.report()["models"].get("m", {}).get("installed") == release)  # type: ignore[misc]
        Fleet.wait(lambda number=number: answer(box) == number)  # type: ignore[misc]
        assert box.report()["models"]["m"]["state"] == "installed", step
    box.stop()


# Four starts, a minute; tests/plugins/fleet/follow/test_follower.py has the rules of a wrong clock.
@pytest.mark.long
@pytest.mark.skipif(
    "EDGE_TEST_FAKETIME" not in os.environ, reason="there is no libfaketime; tests/e2e/fetch_faketime.sh brings one"
)
def test_a_box_without_a_clock_of_its_own_serves_what_it_has_until_its_clock_is_set(
    publisher: Publisher, make_box: Callable[..., Box], tmp_path: Path
) -> None:
    clock = WallClock(tmp_path)
    box = make_box(environment=clock.environment)

    def start_long_ago() -> None:
        clock.jump(-4000 * DAY)
        box.start()
        Fleet.wait(lambda: "the clock is wrong" in box.report()["problem"])

    def set_clock(release: str) -> None:
        clock.jump(0)
        Fleet.wait(lambda: box.report()["models"].get("m", {}).get("installed") == release)
        box.stop()

    start_long_ago()  # a new box: it has never seen the repository
    assert not box.installed()
    set_clock("m/1.json")
    publish(publisher, 2.0)
    start_long_ago()
    assert answer(box) == 1
    assert box.installed() == "m/1.json"
    set_clock("m/2.json")
