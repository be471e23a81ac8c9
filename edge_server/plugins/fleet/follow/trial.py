"""Trial of a release before it serves: a process of its own loads it beside the running server, runs it with the
release's sample, and compares its outputs and its time with what the release allows."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from edge_server.errors import EdgeServerError
from edge_server.plugins.fleet.release import SAMPLE_NAME, Release

_MAX_REASON_CHARS = 500
_NICE = 10
"""Serving goes first."""


class Rejected(EdgeServerError):
    """The release is not fit for this box. The message is the reason."""


class Trial:
    """Tries releases in `folder`, which it may fill. `stop` ends a trial of another thread."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = False

    def stop(self) -> None:
        self._is_stopping = True
        process = self._process
        if process is not None:
            process.kill()

    def run(self, release: Release, staged: Path, repository: Path) -> str:
        """Try the release in `staged`. Return the result as a sentence for the log.

        The other models of `repository` are there for ensembles. Raises Rejected, OSError, and InterruptedError after
        `stop`.
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
        command = [sys.executable, "-m", "edge_server.plugins.fleet.follow.trial_process"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            self._process = process
            try:
                if self._is_stopping:
                    raise InterruptedError
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
                output, errors = process.communicate(json.dumps(job).encode(), self._timeout_s)
            except subprocess.TimeoutExpired:
                raise Rejected(f"its trial took longer than {self._timeout_s:g} s") from None
            finally:
                process.kill()
                self._process = None
        if self._is_stopping:
            raise InterruptedError
        lines = output.splitlines()
        try:
            verdict = json.loads(lines[-1])
            reason, note = str(verdict["reason"]), str(verdict["note"])
        except (IndexError, ValueError, KeyError, TypeError):
            raise Rejected(f"its trial {_end(process.returncode, errors)}") from None
        if reason:
            raise Rejected(reason[:_MAX_REASON_CHARS])
        return note


def _end(code: int, errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    tail = f": {lines[-1][:_MAX_REASON_CHARS]}" if lines else ""
    if code >= 0:
        return f"ended with code {code}{tail}"
    hint = ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}{tail}"
