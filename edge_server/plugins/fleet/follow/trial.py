"""Test of a downloaded release before it serves: a child process (`trial_process.py`) loads it beside the running
server, runs it with the release's sample, and compares its outputs and its time with what the release allows."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from edge_server.backends.isolation.json_child_process import JsonProcess, ReceiveTimeout
from edge_server.errors import EdgeServerError, ServingFault
from edge_server.plugins.fleet.release import SAMPLE_NAME, Release

_MAX_REASON_CHARS = 500
_NICE = 10
"""Serving goes first."""
_POLL_S = 0.1


class Rejected(EdgeServerError):
    """The release is not fit for this box. The message is the reason."""


class Trial:
    """Tries releases in `folder`, which it may fill. `stop` ends a trial of another thread."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._is_stopping = False

    def stop(self) -> None:
        self._is_stopping = True

    def run(self, release: Release, staged: Path, repository: Path) -> str:
        """Try the release in `staged`. Return the result as a sentence for the log.

        The other models of `repository` are there for ensembles. Raises Rejected; ServingFault if this machine cannot
        try it now, such as for full memory or a missing runtime; OSError, and InterruptedError after `stop`.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700, parents=True)
        for entry in repository.iterdir():
            if entry.is_dir() and not entry.name.startswith(".") and entry.name != release.model:
                os.symlink(entry.absolute(), self._folder / entry.name)
        os.symlink(staged.absolute(), self._folder / release.model)
        sample = staged / SAMPLE_NAME
        job = {
            "model": release.model,
            "repository": str(self._folder),
            "serving": str(repository) if (repository / release.model).is_dir() else "",
            "sample": str(sample) if sample.is_file() else "",
            "max_latency_ms": release.max_latency_ms,
            "max_slowdown": release.max_slowdown,
            "tolerance": release.tolerance,
        }
        try:
            return self._run_child(job)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _run_child(self, job: Mapping[str, object]) -> str:
        child = JsonProcess("edge_server.plugins.fleet.follow.trial_process")
        try:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, child.pid, _NICE)
            child.send({**job, "parent": os.getpid()})
            end_s = time.monotonic() + self._timeout_s
            while True:
                if self._is_stopping:
                    raise InterruptedError
                try:
                    verdict = child.receive(_POLL_S)
                    if verdict is None:
                        child.join()  # it ends by itself, and its code tells how
                    break
                except ReceiveTimeout:
                    if time.monotonic() > end_s:
                        raise Rejected(f"its trial took longer than {self._timeout_s:g} s") from None
        finally:
            child.kill()
        if verdict is None and child.was_killed:
            raise ServingFault(f"its trial {child.exit_description()}"[:_MAX_REASON_CHARS])
        if verdict is None:
            raise Rejected(f"its trial {child.exit_description()}"[:_MAX_REASON_CHARS])
        if "machine_fault" in verdict:
            raise ServingFault(verdict["machine_fault"][:_MAX_REASON_CHARS])
        if verdict["reason"]:
            raise Rejected(verdict["reason"][:_MAX_REASON_CHARS])
        return str(verdict["note"])
