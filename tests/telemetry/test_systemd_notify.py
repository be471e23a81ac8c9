"""Messages of sd_notify(3) and the feeding of the watchdog, received by a socket of the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_server.config import ConfigError, LogConfig, ServerConfig
from edge_server.core.exit_code import NO_RESTART_CODES, ExitCode
from edge_server.errors import ServingFault
from edge_server.process.systemd_supervision import EndRequest, HungRunCheck, ProcessEnvironment, Supervision
from edge_server.telemetry.systemd_notify import ServiceManager, WatchdogFeeder


class Listener:
    """Socket of a service manager: receives the messages."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.settimeout(10)

    def next(self) -> list[str]:
        return self._socket.recv(65536).decode("utf-8").split("\n")

    def heard(self) -> list[list[str]]:
        """Return what has come so far and was not taken yet."""
        messages = []
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                messages.append(self._socket.recv(65536).decode("utf-8").split("\n"))
        self._socket.settimeout(10)
        return messages

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    item = Listener(str(tmp_path / "notify") if request.param == "path" else f"@edge-test-{uuid.uuid4().hex}")
    yield item
    item.close()


def test_every_message_is_written_as_by_sd_notify(listener: Listener) -> None:
    manager = ServiceManager(listener.address)
    before_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    manager.ready("2 models served")
    assert listener.next() == ["READY=1", "STATUS=2 models served"]
    manager.reloading("reloading")
    first, stamp, status = listener.next()
    assert (first, status) == ("RELOADING=1", "STATUS=reloading")
    name, _, value = stamp.partition("=")
    assert name == "MONOTONIC_USEC"
    assert before_us <= int(value) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    manager.feed()
    assert listener.next() == ["WATCHDOG=1"]
    manager.extend(2.5)
    assert listener.next() == ["EXTEND_TIMEOUT_USEC=2500000"]
    manager.stopping("finishing", 45)
    assert listener.next() == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=45000000", "STATUS=finishing"]


def test_a_status_is_utf_8_one_line_of_bounded_length_and_sent_only_when_it_changed(listener: Listener) -> None:
    manager = ServiceManager(listener.address)
    manager.status("95 °C — zu heiß\nREADY=1")
    assert listener.next() == ["STATUS=95 °C — zu heiß READY=1"]
    manager.status("95 °C — zu heiß  READY=1")
    assert listener.heard() == []
    manager.status("x" * 100_000)
    (line,) = listener.next()
    assert len(line) < 600


def test_without_a_service_manager_nothing_is_sent_and_nothing_raised() -> None:
    manager = ServiceManager.from_environment({}, 1)
    assert not manager.is_present
    manager.ready("x")
    manager.feed()
    assert ServiceManager.from_environment({"WATCHDOG_USEC": "1000000"}, 1).watchdog_s == 0


def test_a_missing_socket_is_reported_once_and_found_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = ServiceManager(str(tmp_path / "gone"))
    manager.feed()
    manager.feed()
    assert len([record for record in caplog.records if "cannot send" in record.message]) == 1
    listener = Listener(str(tmp_path / "gone"))
    manager.feed()
    assert listener.next() == ["WATCHDOG=1"]
    listener.close()


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({"WATCHDOG_USEC": "15000000"}, 15.0),
        ({"WATCHDOG_USEC": "15000000", "WATCHDOG_PID": "77"}, 15.0),
        ({"WATCHDOG_USEC": "15000000", "WATCHDOG_PID": "78"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
        ({"WATCHDOG_USEC": "-5"}, 0.0),
        ({}, 0.0),
    ],
)
def test_the_watchdog_is_ours_only_when_the_manager_says_so(variables: dict[str, str], seconds: float) -> None:
    manager = ServiceManager.from_environment({"NOTIFY_SOCKET": "/run/notify", **variables}, 77)
    assert (manager.is_present, manager.watchdog_s) == (True, seconds)


@pytest.mark.parametrize("address", ["vsock:2:1234", "relative", ""])
def test_an_address_that_is_no_unix_socket_is_no_manager(address: str) -> None:
    assert not ServiceManager.from_environment({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000"}, 1).is_present


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Feeding:
    """A feeder of a watchdog of 15 s whose clock and checks are the test's."""

    def __init__(self, listener: Listener) -> None:
        self.clock = Clock()
        self.problem = ""
        self.listener = listener
        self.feeder = WatchdogFeeder(ServiceManager(listener.address, 15.0), [lambda: self.problem], clock=self.clock)

    def beat(self, seconds: float, lag_s: float = 0.0, step_s: float = 0.5) -> int:
        """Beat for so long; return how often the watchdog was fed."""
        fed = 0
        for _ in range(round(seconds / step_s)):
            self.clock.now_s += step_s
            self.feeder.beat(lag_s)
            # A socket's queue holds ten datagrams.
            fed += self.listener.heard().count(["WATCHDOG=1"])
        return fed


@pytest.fixture
def feeding(tmp_path: Path) -> Iterator[Feeding]:
    listener = Listener(str(tmp_path / "notify"))
    yield Feeding(listener)
    listener.close()


def test_a_watchdog_is_fed_three_times_in_its_period_while_all_is_well(feeding: Feeding) -> None:
    assert feeding.beat(60) == 12


def test_a_loop_that_is_late_each_time_feeds_nothing(feeding: Feeding) -> None:
    assert feeding.beat(60, lag_s=1.0) == 0
    assert "late" in feeding.feeder.problem


def test_a_hiccup_costs_no_meal_for_the_next_beat_makes_up_for_it(feeding: Feeding) -> None:
    feeding.beat(5)
    assert feeding.beat(0.5, lag_s=3.0) == 0
    assert feeding.beat(10) >= 2


def test_a_check_that_finds_something_stops_the_feeding_until_it_is_well_again(
    feeding: Feeding, caplog: pytest.LogCaptureFixture
) -> None:
    feeding.beat(20)
    feeding.problem = "instance a of model 'm' is stuck"
    assert feeding.beat(60) == 0
    assert [record.message for record in caplog.records if "not fed" in record.message] == [
        "the watchdog of the service manager is not fed: instance a of model 'm' is stuck"
    ]
    feeding.problem = ""
    assert feeding.beat(1) == 1


class Runs:
    name, version = "m", 1

    def __init__(self) -> None:
        self.run_numbers = {"m_0": 0}


def test_only_a_run_that_goes_on_for_longer_than_its_limit_is_a_problem() -> None:
    runs, clock = Runs(), Clock()
    check = HungRunCheck(lambda: [runs], 5.0, lambda: int(clock.now_s * 1e9))  # type: ignore[list-item]
    for _ in range(20):  # busy all the time, but never in one run
        runs.run_numbers["m_0"] += 2
        runs.run_numbers["m_0"] |= 1
        clock.now_s += 1
        assert check() == ""
    for _ in range(4):
        clock.now_s += 1
        assert check() == ""
    clock.now_s += 2
    assert check() == "instance m_0 of model 'm' version 1 has been in one run for more than 5 s"
    runs.run_numbers["m_0"] += 1
    assert check() == ""


def test_a_limit_of_0_lets_runs_take_any_time() -> None:
    runs, clock = Runs(), Clock()
    runs.run_numbers["m_0"] = 1
    check = HungRunCheck(lambda: [runs], 0.0, lambda: int(clock.now_s * 1e9))  # type: ignore[list-item]
    check()
    clock.now_s += 1e6
    assert check() == ""


def supervise(
    listener: Listener, reread: Callable[[], ServerConfig], taken: list[ServerConfig], config: ServerConfig
) -> Supervision:
    environment = ProcessEnvironment(ServiceManager(listener.address), reread)
    supervision = Supervision(config, environment, [], lambda: "1 model served")
    supervision.add_reload(("log.format",), taken.append)
    return supervision


async def reload_once(supervision: Supervision) -> None:
    supervision.started()
    supervision.reload()
    supervision.reload()  # while one is under way
    while supervision._reloading is not None:
        await asyncio.sleep(0.01)
    await supervision.end()


def test_a_reload_is_begun_and_ended_for_the_manager_and_names_what_takes_a_restart(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    new = ServerConfig(log=LogConfig(format="json", file="/var/log/x"))
    taken: list[ServerConfig] = []
    asyncio.run(reload_once(supervise(listener, lambda: new, taken, ServerConfig(log=LogConfig()))))
    assert taken == [new]
    assert [message[0] for message in listener.heard()] == ["READY=1", "RELOADING=1", "READY=1"]
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["SIGHUP: changed, but needs a restart: log.file"]


def test_a_sighup_during_a_reload_is_not_lost(listener: Listener) -> None:
    has_read, may_go_on = threading.Event(), threading.Event()
    files = [ServerConfig(log=LogConfig(format="json")), ServerConfig(log=LogConfig(format="default"))]

    def reread() -> ServerConfig:
        config = files.pop(0)
        if files:
            has_read.set()
            assert may_go_on.wait(20)
        return config

    taken: list[ServerConfig] = []

    async def reload_twice(supervision: Supervision) -> None:
        supervision.started()
        supervision.reload()
        assert await asyncio.to_thread(has_read.wait, 20)
        supervision.reload()
        may_go_on.set()
        while supervision._reloading is not None:
            await asyncio.sleep(0.01)
        await supervision.end()

    asyncio.run(reload_twice(supervise(listener, reread, taken, ServerConfig())))
    assert [config.log.format for config in taken] == ["json", "default"]
    assert [message[0] for message in listener.heard()] == ["READY=1", "RELOADING=1", "RELOADING=1", "READY=1"]


def test_a_configuration_that_cannot_be_read_changes_nothing_and_the_manager_hears_of_the_end_all_the_same(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    def reread() -> ServerConfig:
        raise ConfigError("unknown key log.frmat")

    taken: list[ServerConfig] = []
    asyncio.run(reload_once(supervise(listener, reread, taken, ServerConfig())))
    assert taken == []
    assert "SIGHUP: nothing was reloaded: unknown key log.frmat" in caplog.text
    assert [message[0] for message in listener.heard()] == ["READY=1", "RELOADING=1", "READY=1"]


def test_one_part_that_fails_to_reload_does_not_keep_the_others_from_it(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(config: ServerConfig) -> None:
        raise ServingFault("the key does not fit")

    taken: list[ServerConfig] = []
    environment = ProcessEnvironment(ServiceManager(listener.address), ServerConfig)
    supervision = Supervision(ServerConfig(), environment, [], lambda: "")
    supervision.add_reload(("http.tls_cert",), fail)
    supervision.add_reload((), taken.append)
    asyncio.run(reload_once(supervision))
    assert "http.tls_cert is unchanged: the key does not fit" in caplog.text
    assert len(taken) == 1


def test_the_first_request_to_end_counts(caplog: pytest.LogCaptureFixture) -> None:
    woken: list[None] = []
    end = EndRequest()
    end.notify(lambda: woken.append(None))
    end.submit(ExitCode.GPU_LOST, "GPU 0 fell off the bus")
    end.submit(ExitCode.FAILED, "something else")
    assert end.code is ExitCode.GPU_LOST
    assert len(woken) == 1
    assert "79 (GPU_LOST): GPU 0 fell off the bus" in caplog.text


def test_the_unit_never_restarts_after_just_the_codes_that_a_restart_cannot_heal() -> None:
    unit = (Path(__file__).parents[2] / "systemd/edge-server.service").read_text()
    (line,) = [line for line in unit.splitlines() if line.startswith("RestartPreventExitStatus=")]
    assert [int(word) for word in line.partition("=")[2].split()] == [int(code) for code in NO_RESTART_CODES]
    assert ExitCode.GPU_LOST not in NO_RESTART_CODES
    assert os.EX_USAGE == ExitCode.USAGE
    assert os.EX_CONFIG == ExitCode.CONFIG
