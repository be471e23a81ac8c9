"""Interfaces of the governor (HTTP, metrics, events, status): the installed server on boards made of files."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kit.eventually import eventually
from tests.kit.model_folder import parameters
from tests.kit.models import identity_config
from tests.kit.server import serve

SLOW = parameters(execute_delay_ms="20")
TEXT = "word " * 12


BULK = {
    "inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}],
    "parameters": {"priority": 3},
}


class MachineServer:
    """A server on a board, and the board."""

    def __init__(self, server: Any, board: Any) -> None:
        self.server = server
        self.board = board

    def report(self) -> dict[str, Any]:
        status, answer = self.server.ask("/edge/v1/governor")
        assert status == 200
        return dict(answer)

    def infer(self) -> int:
        status, _ = self.server.infer("slow", BULK)
        return int(status)

    def until(self, condition: Callable[[dict[str, Any]], bool], limit_s: float = 20.0) -> dict[str, Any]:
        """Ask for the report until it is so, and return it."""
        seen: list[dict[str, Any]] = []

        def holds() -> bool:
            seen.append(self.report())
            return condition(seen[-1])

        assert eventually(holds, limit_s), seen[-1]
        return seen[-1]

    def heat(self) -> dict[str, Any]:
        self.board.set_temperature("tj-thermal", 98.5)
        return self.until(lambda report: report["share"] <= 0.15)

    def metrics(self) -> dict[str, float]:
        lines = re.findall(r"^([a-zA-Z_:]\w*(?:\{.*\})?) (\S+)$", self.server.read_metrics(), re.MULTILINE)
        return {name: float(value) for name, value in lines}

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [item for item in self.server.ask("/edge/v1/events?follow=false")[1] if item["kind"] == kind]


@pytest.fixture(scope="module")
def start(
    boards: Any, module_repository: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., MachineServer]]:
    """Starts a server on a board. Tests of a machine that others use leave its temperature as they find it."""
    module_repository.add("slow", identity_config("FP32", "4", more=SLOW))
    script = json.dumps({"answers": {"talk": TEXT}, "step_s": 0.01})
    module_repository.add("talker", 'backend: "scripted_llm"', files={"1/script.json": script})
    with contextlib.ExitStack() as stack:

        def begin(*flags: str) -> MachineServer:
            board = boards.Board("orin_nano_jp6", tmp_path_factory.mktemp("board") / "files")
            stack.callback(board.close)
            flags = (f"--sysfs-root={board.root}", "--governor-interval-ms=100", *flags)
            made = MachineServer(stack.enter_context(serve(module_repository.path, *flags)), board)
            assert eventually(lambda: not made.report()["enabled"] or made.report()["temperature_c"] is not None)
            return made

        yield begin


@pytest.fixture(scope="module")
def cool_machine(start: Callable[..., MachineServer]) -> MachineServer:
    return start()


@pytest.fixture(scope="module")
def hot_machine(start: Callable[..., MachineServer]) -> MachineServer:
    hot = start("--governor-load-wait-secs=1", "--model-control-mode=explicit", "--load-model=*")
    hot.heat()
    return hot


@pytest.fixture(scope="module")
def limited_machine(start: Callable[..., MachineServer]) -> MachineServer:
    return start("--allow-gpu-metrics=false", "--temperature-limit=60", "--power-budget-watts=12")


def status_of(server: Any, run_command: Callable[..., subprocess.CompletedProcess[str]]) -> str:
    done = run_command("status", f"--url=http://{server.http}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_cool_machine_reports_its_kind_and_its_readings(cool_machine: MachineServer) -> None:
    report = cool_machine.report()
    assert (report["state"], report["share"], report["steers_by"]) == ("NORMAL", 1.0, "tj")
    assert report["box"]["board"].startswith("NVIDIA Jetson Orin Nano")
    assert report["box"]["power_mode"]["name"] == "25W"
    assert report["set_point_c"] == 95.0
    zones = {zone["name"]: zone for zone in report["box"]["zones"]}
    assert zones["cv0"]["temperature_c"] is None
    assert "switched off" in zones["cv0"]["problem"]
    assert "nvml" in report["box"]["missing"]


def test_heat_is_reported_by_every_interface(hot_machine: MachineServer, run_command: Any) -> None:
    hot = hot_machine.report()
    assert hot["state"] == "HOT"
    assert "to be kept at 95 °C" in hot["detail"]
    text = status_of(hot_machine.server, run_command)
    assert "governor: HOT" in text
    assert "of 95 °C" in text
    assert "Orin Nano" in text
    # The share moves on while it is read: the heat came in one step, and its slope is forgotten little by little.
    before = hot_machine.report()["share"]
    metrics = hot_machine.metrics()
    after = hot_machine.report()["share"]
    assert metrics["edge_governor_level"] == 2
    assert min(before, after) - 0.01 <= metrics["edge_governor_share"] <= max(before, after) + 0.01
    assert metrics["edge_governor_share"] < 0.5
    assert metrics['edge_temperature_celsius{zone="tj"}'] == 98.5
    assert [event["level"] for event in hot_machine.events("governor.state")][-1] == "HOT"
    assert "the box is HOT" in hot_machine.server.log()


def test_a_hot_machine_refuses_with_429_and_retry_after_and_stays_ready(hot_machine: MachineServer) -> None:
    statuses = [hot_machine.infer() for _ in range(60)]
    assert set(statuses) == {200, 429}
    assert eventually(lambda: hot_machine.infer() == 429)
    with contextlib.closing(hot_machine.server.connection()) as line:

        def ask(method: str, path: str, body: str | None = None) -> tuple[int, Any, bytes]:
            line.request(method, path, body)
            reply = line.getresponse()
            return reply.status, reply.headers, reply.read()

        # Refused in a row: the store is empty now, and another one is as well.
        answers = (ask("POST", "/v2/models/slow/infer", json.dumps(BULK)) for _ in range(50))
        headers, text = next((headers, text) for status, headers, text in answers if status == 429)
        assert "takes no more bulk requests for now: the box is HOT" in json.loads(text)["error"]
        assert int(headers["Retry-After"]) >= 1
        assert headers["Edge-Governor"] == "HOT"
        for path in ("/v2/health/live", "/v2/health/ready"):
            status, headers, _ = ask("GET", path)
            assert status == 200
        assert headers["Edge-Governor"] == "HOT"
    shed = {(item["class"], item["reason"]): item["count"] for item in hot_machine.report()["shed"]}
    assert shed["bulk", "heat"] >= statuses.count(429)
    assert hot_machine.metrics()['edge_shed_total{class="bulk",reason="heat"}'] == shed["bulk", "heat"]


def test_a_machine_that_loses_all_sensors_continues_to_serve(start: Callable[..., MachineServer]) -> None:
    machine = start()
    machine.board.remove("/sys")
    report = machine.until(lambda report: report["temperature_c"] is None and report["share"] <= 0.5)
    assert {"temperature", "power"} <= set(report["sensors_lost"])
    assert machine.server.get("/v2/health/ready")[0] == 200
    assert machine.infer() in (200, 429)
    assert machine.server.stop() == 0
    assert "Traceback" not in machine.server.log()


def test_tritons_gpu_metrics_exist_on_a_jetson(cool_machine: MachineServer) -> None:
    cool_machine.until(lambda report: report["energy_j"] is not None)
    metrics = cool_machine.metrics()
    label = '{gpu_uuid="igpu"}'
    names = ("gpu_utilization", "gpu_memory_total_bytes", "gpu_memory_used_bytes", "gpu_power_usage",
             "energy_consumption")  # fmt: skip
    assert all(metrics[f"nv_{name}{label}"] > 0 for name in names)
    assert metrics[f"nv_gpu_power_limit{label}"] == 25.0


def test_limits_are_those_of_the_flags_and_gpu_metrics_can_be_switched_off(limited_machine: MachineServer) -> None:
    names = limited_machine.server.read_metrics()
    assert "nv_gpu" not in names
    assert "edge_temperature_celsius" in names
    assert limited_machine.metrics()["edge_power_budget_watts"] == 12
    limited_machine.board.set_rail("VDD_IN", 16.0)
    assert limited_machine.until(lambda report: report["share"] < 0.9)["limited_by"] == "power_budget"
    assert limited_machine.report()["set_point_c"] == 60.0


def test_a_critical_machine_finishes_text_streams_but_starts_none_and_loads_no_model(
    start: Callable[..., MachineServer], module_repository: Any
) -> None:
    machine = start("--model-control-mode=explicit", "--load-model=*")
    chat = {"model": "talker", "messages": [{"role": "user", "content": "talk"}]}
    machine.until(lambda report: report["power_w"] is not None)
    # Until the energy of its tokens is known.
    for _ in range(20):
        assert machine.server.ask("/v1/chat/completions", {**chat, "max_tokens": 60})[0] == 200
        costs = [item for item in machine.report()["joules_per_inference"] if item["model"] == "talker"]
        if {item.get("phase") for item in costs} == {"prefill", "decode"}:
            break
    assert {item["phase"] for item in costs} == {"prefill", "decode"}
    assert any(name.startswith('edge_llm_joules_per_token{model="talker"') for name in machine.metrics())
    with (
        contextlib.closing(machine.server.connection()) as streaming,
        contextlib.closing(machine.server.connection()) as other,
    ):
        headers = {"Content-Type": "application/json"}
        streaming.request("POST", "/v1/chat/completions", json.dumps({**chat, "stream": True}), headers)
        stream = streaming.getresponse()
        assert stream.status == 200
        machine.board.set_temperature("tj-thermal", 103.0)
        machine.until(lambda report: report["state"] == "CRITICAL")
        other.request("POST", "/v1/chat/completions", json.dumps(chat), headers)
        refused = other.getresponse()
        assert (refused.status, json.load(refused)["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["Retry-After"]) >= 1
        lines = stream.read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines[:-2]]
    assert "".join(delta.get("content", "") for delta in deltas) == TEXT
    module_repository.add("later", identity_config("FP32", "4"))
    status, answer = machine.server.ask("/v2/repository/models/later/load", {})
    assert status == 400
    assert "the box is CRITICAL" in answer["error"]


def test_without_a_governor_its_interfaces_are_absent(start: Callable[..., MachineServer], run_command: Any) -> None:
    machine = start("--governor=false")
    assert machine.report()["enabled"] is False
    assert "governor: off" in status_of(machine.server, run_command)
    line = machine.server.connection()
    line.request("GET", "/v2/health/ready")
    reply = line.getresponse()
    reply.read()
    assert "Edge-Governor" not in reply.headers
    line.close()
    assert "edge_governor" not in machine.server.read_metrics()
    machine.board.set_temperature("tj-thermal", 103.0)
    assert {machine.infer() for _ in range(20)} == {200}


def test_without_a_governor_its_modules_are_not_imported(repository: Any) -> None:
    # In one process: what the second server imports, the first one did not.
    code = (
        "import sys\n"
        "from edge_server.config import parse_serve\n"
        "from edge_server.plugin import own_plugins\n"
        "from edge_server.process.composition_root import build\n"
        "from edge_server.telemetry.log import setup_logging\n"
        "plugins = own_plugins()\n"
        "for flag in ('--governor=false', '--governor=true'):\n"
        "    config = parse_serve([*sys.argv[1:], flag], {}, plugins).config\n"
        "    build(config, setup_logging(config.log), plugins).close(1.0)\n"
        "    print([name for name in sys.modules if 'governor' in name or name == 'pynvml'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, f"--model-repository={repository.path}"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    without, with_governor = done.stdout.splitlines()
    assert "edge_server.plugins.governor.running_plugin" not in without
    assert "pynvml" not in without
    assert "edge_server.plugins.governor.running_plugin" in with_governor
