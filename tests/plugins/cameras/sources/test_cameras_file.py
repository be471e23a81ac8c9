"""Sources and sinks together: from the image to the line of JSON, and a cameras file that is edited at run time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from edge_server.plugins.cameras import server_cameras
from edge_server.plugins.cameras.server_cameras import ServerCameras
from edge_server.plugins.cameras.settings import SourcesConfig
from edge_server.plugins.cameras.source_and_sink_settings import SinkEntry, SourceEntry
from edge_server.plugins.cameras.zones.zone_settings import ZoneEntry
from edge_server.telemetry.event_bus import EventBus

FOLDER = """
[[sources]]
name = "{name}"
url = "{folder}"
model = "sum"
fps = 200
"""
SINK = """
[[sinks]]
name = "log"
url = "{path}"
"""


@pytest.fixture
def start(core, monkeypatch):
    monkeypatch.setattr(server_cameras, "POLL_S", 0.02)
    made = []

    def make(**fields):
        bus, events = EventBus(), []
        bus.subscribe(lambda event: events.append((event.kind, dict(event.fields))))
        cameras = ServerCameras(SourcesConfig(**fields), core.streams, bus, core.service)
        cameras.events = events
        made.append(cameras)
        cameras.start()
        return cameras

    yield make
    for cameras in made:
        cameras.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith(("source", "sink"))] == []


def lines(path: Path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_frame_goes_through_the_model_to_the_output_file(start, folder, tmp_path, eventually):
    path = tmp_path / "out.jsonl"
    cameras = start(sources=(SourceEntry("door", str(folder), "sum", fps=200.0),), sinks=(SinkEntry("log", str(path)),))
    assert eventually(lambda: len(lines(path)) > 10)
    cameras.close()
    first, *results = lines(path)
    assert first == {"kind": "source", "source": "door", "state": "RUNNING"}
    assert {item["kind"] for item in results} == {"result"}
    assert results[0]["stream"] == "door"
    assert results[0]["tensors"][0]["name"] == "SUM"
    assert cameras.report().sources == cameras.report().sinks == ()


def test_results_of_a_source_go_to_its_sinks(start, folder, tmp_path, eventually):
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    start(
        sources=(
            SourceEntry("a", str(folder), "sum", fps=200.0, sinks=("one",)),
            SourceEntry("b", str(folder), "sum", fps=200.0),
            SourceEntry("c", str(folder), "sum", fps=200.0, sinks=()),
        ),
        sinks=(SinkEntry("one", str(first)), SinkEntry("two", str(second))),
    )
    assert eventually(lambda: {item.get("stream") for item in lines(first)} >= {"a", "b"})
    assert eventually(lambda: len(lines(second)) > 5)
    assert {item.get("stream", item.get("source")) for item in lines(second)} == {"b"}


def test_editing_the_file_adds_changes_and_removes_cameras(start, folder, tmp_path, eventually):
    file, out = tmp_path / "cameras.toml", tmp_path / "out.jsonl"
    cameras = start(file=str(file))
    assert cameras.report().problem.startswith(f"no camera is open: --sources-file: cannot read '{file}'")
    file.write_text(FOLDER.format(name="door", folder=folder) + SINK.format(path=out))
    assert eventually(lambda: [source.state for source in cameras.report().sources] == ["RUNNING"])
    assert cameras.report().problem == ""
    assert eventually(lambda: lines(out))
    file.write_text(FOLDER.format(name="gate", folder=folder) + SINK.format(path=out))
    assert eventually(lambda: [source.name for source in cameras.report().sources] == ["gate"])
    assert eventually(lambda: {"kind": "source", "source": "door", "state": "REMOVED"} in lines(out))
    file.write_text("")
    assert eventually(lambda: cameras.report().sources == cameras.report().sinks == ())


def test_an_invalid_file_changes_no_camera(start, folder, tmp_path, eventually):
    file = tmp_path / "cameras.toml"
    file.write_text(FOLDER.format(name="door", folder=folder))
    cameras = start(file=str(file))
    assert eventually(lambda: [source.state for source in cameras.report().sources] == ["RUNNING"])
    file.write_text(FOLDER.format(name="door", folder=folder) + "modle = 'x'")
    assert eventually(lambda: "unknown key modle" in cameras.report().problem)
    assert cameras.report().problem.startswith(f"the cameras are unchanged: {file}: ")
    assert [source.state for source in cameras.report().sources] == ["RUNNING"]
    # The event follows the report.
    assert eventually(
        lambda: (
            [fields["reason"] for kind, fields in cameras.events if kind == "sources.file_refused"]
            == [cameras.report().problem]
        )
    )
    file.unlink()
    assert eventually(lambda: "No such file" in cameras.report().problem)
    assert [source.name for source in cameras.report().sources] == ["door"]


def test_a_sink_that_is_added_gets_the_state_of_the_cameras_that_run(start, folder, tmp_path, eventually):
    file, out = tmp_path / "cameras.toml", tmp_path / "out.jsonl"
    file.write_text(FOLDER.format(name="door", folder=folder))
    cameras = start(file=str(file))
    assert eventually(lambda: [source.state for source in cameras.report().sources] == ["RUNNING"])
    file.write_text(FOLDER.format(name="door", folder=folder) + SINK.format(path=out))
    assert eventually(lambda: {"kind": "source", "source": "door", "state": "RUNNING"} in lines(out))
    assert cameras.report().sources[0].failures == 0


def test_a_failing_sink_loses_no_frame(start, folder, tmp_path, eventually):
    cameras = start(
        sources=(SourceEntry("door", str(folder), "sum", fps=200.0),),
        sinks=(SinkEntry("log", str(tmp_path / "absent/out.jsonl")),),
    )
    assert eventually(lambda: cameras.report().sinks[0].dropped > 5)
    sink, source = cameras.report().sinks[0], cameras.report().sources[0]
    assert (sink.state, sink.delivered) == ("FAILED", 0)
    assert sink.reason.endswith("absent must exist")
    assert (source.state, source.reason) == ("RUNNING", "")
    assert sink.received == sink.delivered + sink.suppressed + sink.dropped + sink.waiting
    assert any(kind == "sink.failed" for kind, _ in cameras.events)


def test_a_server_without_cameras_imports_no_camera_modules() -> None:
    code = (
        "import sys, threading, edge_server.process.server, edge_server.process.http_routes\n"
        "from types import SimpleNamespace\n"
        "from edge_server.config import ServerConfig\n"
        "from edge_server.plugins.cameras.plugin import PLUGIN\n"
        "cameras = PLUGIN.prepare(ServerConfig())\n"
        "cameras.build(SimpleNamespace(service=None, access=None, admission=None))\n"
        "cameras.start(), cameras.routes(), cameras.models_known(), cameras.begin_stop(), cameras.stop(0.0)\n"
        "ours = ('cameras.sources', 'cameras.sinks', 'cameras.streams', 'vision.')\n"
        "late = ('av', 'paho', 'cv2', *('edge_server.plugins.' + name for name in ours))\n"
        "print([name for name in sys.modules if name.startswith(late)], threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] 1"


def test_sources_and_sinks_import_their_libraries_when_they_need_them() -> None:
    code = (
        "import sys, threading, edge_server.plugins.cameras.server_cameras\n"
        "print([name for name in ('av', 'paho', 'cv2', 'onnxruntime', 'openvino') if name in sys.modules], "
        "threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] 1"


def test_zones_over_a_model_that_detects_nothing_are_reported_and_change_without_a_new_stream(
    start, core, folder, eventually, caplog
):
    text = f"[[sources]]\nname='door'\nurl='{folder}'\nmodel='sum'\nfps=50\n"
    file = folder.parent / "zones.toml"
    file.write_text(text + "[[sources.zones]]\nname='yard'\n[[sources.lines]]\nname='gate'\npoints=[[0,0],[1,1]]\n")
    cameras = start(file=str(file))
    assert eventually(lambda: cameras.report().sources[0].state == "RUNNING")
    reason = cameras.report().sources[0].reason
    assert reason == "its zones and lines count nothing: model 'sum' detects no objects"
    assert {f.name: list(f.samples()) for f in cameras.families() if f.name.startswith(("edge_zone", "edge_line"))} == {
        "edge_zone_objects": [],
        "edge_zone_loitering_objects": [],
        "edge_zone_entered_total": [("", {"source": "door", "zone": "yard"}, 0)],
        "edge_line_crossings_total": [
            ("", {"source": "door", "line": "gate", "direction": "in"}, 0),
            ("", {"source": "door", "line": "gate", "direction": "out"}, 0),
        ],
    }
    (before,) = core.streams.reports()
    file.write_text(text)
    assert eventually(lambda: cameras.report().sources[0].reason == "")
    (after,) = core.streams.reports()
    assert (after.open_s > before.open_s, cameras.report().sources[0].failures) == (True, 0)
    file.write_text(text + "[[sources.zones]]\nname='yard'\n")
    warning = f"source 'door': {reason}"
    assert eventually(lambda: [record.getMessage() for record in caplog.records].count(warning) == 2)


def test_a_zone_that_a_sink_requires_can_be_added_where_it_is_missing(start, folder, tmp_path):
    file = tmp_path / "cameras.toml"
    file.write_text(
        f"[[sources]]\nname='door'\nurl='{folder}'\nmodel='sum'\n"
        f"[[sinks]]\nname='log'\nurl='{tmp_path / 'log'}'\nrequired_zones=['yard']\n"
    )
    cameras = start(file=str(file))
    assert cameras.report().problem == (
        "no camera is open: sink 'log': no source has the zone 'yard'; "
        "add it to a source, or change the sink's required_zones"
    )
    assert cameras.set_zones("door", (ZoneEntry("yard"),), ())["stored_in"] == "sources_file"
    assert cameras.report().problem == ""
    assert [source.name for source in cameras.report().sources] == ["door"]
