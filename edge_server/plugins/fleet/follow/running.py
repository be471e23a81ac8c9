"""Part of a running server that follows a signed repository: starts the loop of the follower, and reports its state."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_server.config import ServerConfig
from edge_server.core.status_reports import find_failed
from edge_server.errors import ServingFault
from edge_server.plugin import RunningPlugin, ServingCore, StatusPart, StatusRow
from edge_server.plugins.fleet.follow.follow_loop import Rounds, make_follower, read_hours
from edge_server.plugins.fleet.follow.follower import Follower, Judge
from edge_server.plugins.fleet.follow.installed_models import InstalledModels
from edge_server.plugins.fleet.program_update import read_update_status
from edge_server.plugins.fleet.release import version_digests
from edge_server.plugins.fleet.reports.box_report import RELEASE_STATES, find_release_failures
from edge_server.plugins.fleet.settings import FollowConfig
from edge_server.telemetry.event_bus import MODEL_FAILED, Event
from edge_server.telemetry.metrics_page import Family
from edge_server.version import __version__

if TYPE_CHECKING:
    from edge_server.plugins.fleet.reports.report_publisher import ReportPublisher

_SERVE_TIMEOUT_S = 900.0
"""Most time from an exchange of files until the server serves them."""
_LOADED_LATER = "unloaded: "
"""Beginning of the index's reason for a model that its next request loads. It would not serve before."""
_POLL_S = 0.1
_CLOSE_S = 3.0


class FollowPlugin(RunningPlugin):
    """One follower into the first model repository."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises EdgeServerError for wrong settings."""
        self._config = config.table(FollowConfig)
        self._models = InstalledModels(Path(config.repository.paths[0]))
        read_hours(self._config.hours)
        self._lock = ExitStack()
        self._core: ServingCore | None = None
        """Set at the end of `build`, after all of the following."""
        self._judge: ServingJudge
        self._follower: Follower
        self._rounds: Rounds
        self._publisher: ReportPublisher | None = None
        self._thread: threading.Thread | None = None

    def build(self, core: ServingCore) -> None:
        self._judge = ServingJudge(core)
        self._follower = make_follower(self._config, self._models, core.machine_root, self._judge)
        self._rounds = Rounds(self._follower, self._config, core.heavy_work_refusal, self._wake_publisher)
        if self._config.mqtt:
            from edge_server.plugins.fleet.reports.report_publisher import ReportPublisher

            self._publisher = ReportPublisher(self._config, self._follower.report.box.id, self._report)
            core.events.subscribe(lambda event: self._wake_publisher())
        self._core = core

    def _wake_publisher(self) -> None:
        if self._publisher is not None:
            self._publisher.wake()

    def start(self) -> None:
        """Take the repository, and undo what a killed process left in it. `edge-server check` does not call this."""
        self._lock.enter_context(self._models.locked())
        try:
            self._follower.begin()
        except OSError as error:
            raise ServingFault(f"'{self._models.folder}' cannot be used: {error}") from None
        if self._publisher is not None:
            self._publisher.start()

    def models_settled(self) -> None:
        def run() -> None:
            self._follower.judge_probations()
            self._rounds.run()

        self._thread = threading.Thread(target=run, name="edge-follow", daemon=True)
        self._thread.start()

    def begin_stop(self) -> None:
        if self._core is None:
            return
        self._judge.stop()
        self._rounds.stop()
        if self._publisher is not None:
            self._publisher.stop()

    def stop(self, timeout_s: float) -> None:
        self.begin_stop()
        if self._thread is not None:
            self._thread.join(min(timeout_s, _CLOSE_S))
        if self._thread is None or not self._thread.is_alive():
            self._lock.close()

    def status(self) -> Sequence[StatusPart]:
        report = self._follower.report
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report.checked_s)) if report.checked_s else "never"
        texts = [f"{report.repository} as box {report.box.id}, last complete {when}"]
        if report.problem:
            texts.append(report.problem)
        failures = find_release_failures(report.as_json())
        texts += failures
        broker_problem = ""
        if self._publisher is not None:
            broker_problem = self._publisher.problem and f"not reported: {self._publisher.problem}"
            texts.append(broker_problem or f"reported to {self._publisher.address}")
        state = "failed" if failures else "warning" if report.problem or broker_problem else "ok"
        rows = [StatusRow("follow", state, texts[0]), *(StatusRow("", state, text) for text in texts[1:])]
        return [*rows, *read_update_status()]

    def reports(self) -> Mapping[str, object]:
        return {"follow": self._follower.report.as_json()}

    def _report(self) -> dict[str, Any]:
        """Return the report for a broker."""
        assert self._core is not None
        service = self._core.service
        runtimes = {(item.name, str(item.version)): item.runtime for item in service.instance_reports()}
        report = {
            "version": __version__,
            "ready": service.is_ready(),
            "models": [
                {"name": item.name, "version": item.version, "state": item.state, "reason": item.reason,
                 "digest": item.digest, "runtime": runtimes.get((item.name, item.version), "")}
                for item in service.repository_index()
            ],
            "follow": self._follower.report.as_json(),
        }  # fmt: skip
        governor = service.plugin("governor")
        if isinstance(governor, RunningPlugin) and isinstance(heat := governor.reports().get("governor"), Mapping):
            report["governor"] = {key: heat.get(key) for key in ("enabled", "state", "share", "temperature_c")}
        return report

    def families(self) -> Iterable[Family]:
        report = self._follower.report
        family = Family("edge_follow_releases", "gauge", "Releases for this box, by what became of them")
        for state in RELEASE_STATES:
            family.add({"state": state}, sum(model.state == state for model in report.models.values()))
        yield family
        family = Family("edge_follow_last_complete_seconds", "gauge", "When the signed repository was last read whole")
        family.add({}, report.checked_s)
        yield family


class ServingJudge(Judge):
    """Waits for the versions of exchanged files in this process's index."""

    def __init__(self, core: ServingCore) -> None:
        self._service = core.service
        self._stopping = threading.Event()
        self._failures: dict[str, str] = {}
        core.events.subscribe(self._note)

    def stop(self) -> None:
        self._stopping.set()

    def expect(self, model: str) -> None:
        self._failures.pop(model, None)

    def wait(self, model: str, files: Mapping[str, str]) -> str | None:
        expected = version_digests(files)
        end_s = time.monotonic() + _SERVE_TIMEOUT_S
        while not self._stopping.is_set():
            entries = [entry for entry in self._service.repository_index() if entry.name == model]
            ready = {int(entry.version): entry.digest for entry in entries if entry.state == "READY"}
            if ready and all(digest == expected.get(version) for version, digest in ready.items()):
                return ""
            if any(entry.reason.startswith(_LOADED_LATER) for entry in entries) and not ready:
                return ""
            if model in self._failures:
                failed = find_failed(entries)
                if failed and failed[0].is_machines_fault:
                    raise ServingFault(failed[0].reason)
                return failed[0].reason if failed else self._failures[model]
            if time.monotonic() > end_s:
                return f"the server does not serve it {_SERVE_TIMEOUT_S:g} s after the exchange"
            self._stopping.wait(_POLL_S)
        return None

    def _note(self, event: Event) -> None:
        if event.kind == MODEL_FAILED:
            self._failures[str(event.fields.get("model"))] = str(event.fields.get("reason", ""))
