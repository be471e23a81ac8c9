"""Trials of configurations, each with its own server on free ports."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_server.core.tensor import DType, Tensor
from edge_server.errors import EdgeServerError, InvalidRequest
from edge_server.protocol.raw_tensors import tensor_from_raw
from edge_server.repository.pbtxt import ConfigMessage, new_config, read_file
from edge_server.repository.safe_paths import check_relative, find_inside
from edge_server.tuning.load.client_interface import MeasuredRequest, RequestRefused, Unreachable
from edge_server.tuning.load.configuration_search import TrialOutcome
from edge_server.tuning.load.grpc_client import GrpcControl, raw_outputs, write_grpc
from edge_server.tuning.load.http_client import HttpControl
from edge_server.tuning.load.input_data import InputChoice, make_inputs
from edge_server.tuning.load.interrupts import Interrupts
from edge_server.tuning.load.measurement import MeasurementTimes
from edge_server.tuning.load.measurement_session import LoadSession, MeasuredServer
from edge_server.tuning.load.measurement_windows import MeasuredPoint
from edge_server.tuning.load.server_candidates import ServerCandidate, apply

_READY = re.compile(r"edge-server \S+ is ready: HTTP (http://[^;\s]+); gRPC ([^;\s]+)")
_STOP_S = 15.0
_REASON_LINES = 3
_LABELS = "label_filename of an output"

Outputs = list[dict[str, npt.NDArray[Any]]]


class NotLoaded(RequestRefused):
    """The server runs, and the model does not load with this configuration."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model in a repository. `config` is its config.pbtxt, empty where it has none."""

    path: Path
    config: ConfigMessage

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def open(cls, repository: Path, name: str) -> ModelFolder:
        """Raises InvalidRequest when there is no such model, BadModelConfig when its configuration cannot be read."""
        path = repository / name
        if "/" in name or name in ("", ".", "..") or not path.is_dir():
            raise InvalidRequest(f"there is no model '{name}' in {repository}")
        file = path / "config.pbtxt"
        config = read_file(file, name) if file.is_file() else new_config()
        return cls(path.resolve(), config)


@dataclass
class PrivateServer:
    """A server of one model with a configuration of its own. `reason` of a model that does not load is said by it."""

    process: subprocess.Popen[str]
    log: Path
    url: str = ""
    address: str = ""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=40))

    def why(self) -> str:
        """Return the last things it said."""
        lines = self.log.read_text(errors="replace").splitlines() or list(self.tail)
        return " / ".join(lines[-_REASON_LINES:]) or f"it ended with {self.process.returncode}"


@contextlib.contextmanager
def private_server(
    model: ModelFolder, config: ConfigMessage, start_s: float, interrupts: Interrupts
) -> Iterator[PrivateServer]:
    """Serve the model, and beside it the others of its repository should it call them. Raises Unreachable.

    Whatever happens, the process has ended and the folder is gone afterwards; interrupts are allowed in between.
    """
    with tempfile.TemporaryDirectory(prefix="edge-analyze-") as folder:
        repository = _lay_out(model, config, Path(folder) / "models")
        log = Path(folder) / "log"
        process = _start(model.name, repository, log)
        server = PrivateServer(process, log)
        try:
            with interrupts.allowed():
                _wait_until_ready(server, start_s)
                yield server
        finally:
            _end(process)


def _start(name: str, repository: Path, log: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "edge_server", "serve", f"--model-repository={repository}",
        "--model-control-mode=explicit", f"--load-model={name}", "--allow-external-links=true",
        "--http-port=0", "--grpc-port=0", "--allow-metrics=false", "--log-info=false", "--exit-on-error=false",
        "--http-address=127.0.0.1", "--grpc-address=127.0.0.1",
    ]  # fmt: skip
    with log.open("w") as errors:
        # A session of its own: Ctrl-C is for us, and we end it in order.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )


def _lay_out(model: ModelFolder, config: ConfigMessage, repository: Path) -> Path:
    """Make a repository of links into the real one, in which only the model's configuration is another.

    Raises BadModelConfig for a label file that is absent or lies outside the model's folder.
    """
    mine = repository / model.name
    mine.mkdir(parents=True)
    # These are copies: a label file must lie in the model's folder, links followed, whatever else may be a link.
    copied = {check_relative(output.label_filename, _LABELS) for output in config.output if output.label_filename}
    for item in model.path.iterdir():
        # A variant of the configuration, and sums of files that are others now, would get in the way.
        if item.name not in ("config.pbtxt", "configs", "SHA256SUMS", "SHA256SUMS.sig"):
            _link(
                item, mine / item.name, {path.relative_to(item.name) for path in copied if path.parts[0] == item.name}
            )
    for name in copied:
        shutil.copyfile(find_inside(model.path, str(name), _LABELS), mine / name)
    for other in model.path.parent.iterdir():
        if other.is_dir() and other.name != model.name:
            (repository / other.name).symlink_to(other)
    served = type(config)()
    served.CopyFrom(config)
    # They hold files against sums, which follow no link either, and change nothing of what is measured.
    served.ClearField("model_repository_agents")
    (mine / "config.pbtxt").write_text(str(served), encoding="utf-8")
    return repository


def _link(item: Path, link: Path, left_out: set[PurePosixPath]) -> None:
    """Link to a file or folder; a folder with something to be left out becomes one of links."""
    if not left_out:
        link.symlink_to(item)
    elif PurePosixPath() not in left_out:
        link.mkdir()
        for inner in item.iterdir():
            _link(
                inner,
                link / inner.name,
                {path.relative_to(inner.name) for path in left_out if path.parts[0] == inner.name},
            )


def _wait_until_ready(server: PrivateServer, start_s: float) -> None:
    assert server.process.stdout is not None
    # A server that hangs while it starts is ended, so that the read below ends too.
    limit = threading.Timer(start_s, _kill_all, (server.process,))
    try:
        # Within: an interrupt as early as this must not leave a timer that keeps the process for minutes.
        limit.start()
        for line in server.process.stdout:
            server.tail.append(line.rstrip())
            found = _READY.match(line)
            if found:
                server.url, server.address = found[1], found[2]
                threading.Thread(target=_read_on, args=(server,), daemon=True).start()
                return
    finally:
        limit.cancel()
    server.process.wait()
    server.process.stdout.close()
    raise Unreachable(f"the server did not start: {server.why()}")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    _kill_all(process)
    process.wait()


def _kill_all(process: subprocess.Popen[str]) -> None:
    """Kill the server and what its models have started: such a process keeps the output open that is read here."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _read_on(server: PrivateServer) -> None:
    """Take what it prints, so that it never waits for a reader, until it has ended."""
    assert server.process.stdout is not None
    with server.process.stdout as lines:
        server.tail.extend(lines)


@dataclass
class Trials:
    """Tries one candidate after the other. The first one is the reference of the numeric differences."""

    model: ModelFolder
    backend: str
    concurrencies: Sequence[int]
    choice: InputChoice
    patience: MeasurementTimes
    interrupts: Interrupts
    limit_ms: float | None = None
    start_s: float = 120.0
    on_trial: Callable[[ServerCandidate, int], None] | None = None
    reference: Outputs | None = None
    not_offered: dict[tuple[str, str], str] = field(default_factory=dict)
    """(backend, precision) -> why it does not load, so that its other numbers of threads need not be tried."""

    def run(self, candidate: ServerCandidate, round_number: int) -> TrialOutcome:
        """Serve, compare and measure; each round twice as long as the one before. Problems are told in the outcome."""
        if self.on_trial is not None:
            self.on_trial(candidate, round_number)
        kind = (candidate.backend, candidate.precision)
        if kind in self.not_offered:
            return TrialOutcome(candidate, problem=self.not_offered[kind], round=round_number)
        config = apply(candidate, self.model.config, self.backend)
        try:
            with private_server(self.model, config, self.start_s, self.interrupts) as server:
                return self._measure(server, candidate, round_number)
        except NotLoaded as error:
            if candidate.precision:
                self.not_offered[kind] = error.message
            return TrialOutcome(candidate, problem=error.message, round=round_number)
        except EdgeServerError as error:
            return TrialOutcome(candidate, problem=error.message, round=round_number)

    def _measure(self, server: PrivateServer, candidate: ServerCandidate, round_number: int) -> TrialOutcome:
        http = HttpControl(server.url, (), 30.0)
        report = loaded(http, self.model.name)
        target = MeasuredServer("grpc", server.address)
        control = GrpcControl(target.endpoint(), target.timeout_s)
        session = LoadSession(target, control.model(self.model.name, ""), control, self._patience(round_number))
        try:
            session.pid = server.process.pid
            session.batch = self.choice.batch
            session.steps = make_inputs(session.model, self.choice)
            session.power_w = lambda: http.ask("/edge/v1/governor").get("power_w")
            if http.ask("/edge/v1/governor").get("power_w") is None:
                session.power_w = None
            outputs = self._outputs(control, session)
            if self.reference is None and candidate.is_default:
                self.reference = outputs
            points: list[MeasuredPoint] = []
            for concurrency in self.concurrencies:
                points.append(session.at_concurrency(concurrency))
                # More of the same load only makes it later.
                if self.limit_ms is not None and points[-1].percentiles_ms[50] > self.limit_ms:
                    break
        finally:
            session.close()
        difference = None if self.reference is None else largest_difference(self.reference, outputs)
        return TrialOutcome(
            candidate, points, difference, report.get("runtime", ""), report.get("precision", ""), round=round_number
        )

    def _patience(self, round_number: int) -> MeasurementTimes:
        return replace(self.patience, window_s=self.patience.window_s * 2**round_number)

    def _outputs(self, control: GrpcControl, session: LoadSession) -> Outputs:
        found: Outputs = []
        for tensors in session.steps:
            response = control.infer(write_grpc(MeasuredRequest(session.model, tensors, {})))
            found.append(
                {
                    name: as_numbers(tensor_from_raw(name, dtype, shape, raw, model=session.model.name))
                    for name, (dtype, shape, raw) in raw_outputs(response).items()
                }
            )
        return found


def loaded(http: HttpControl, name: str) -> dict[str, Any]:
    """Return the facts of the served model. Raises NotLoaded with the reason if it is not served."""
    for item in http.ask("/edge/v1/models")["models"]:
        if item["name"] == name:
            return dict(item)
    index = http.ask("/v2/repository/index", {})
    reasons = [item.get("reason", "") for item in index if item["name"] == name]
    raise NotLoaded(next((reason for reason in reasons if reason), f"model '{name}' did not load"))


def as_numbers(tensor: Tensor) -> npt.NDArray[Any]:
    """Return the values of an output to compare: BF16 as numbers, BYTES as they are."""
    if tensor.dtype is DType.BF16:
        return (tensor.array.astype(np.uint32) << 16).view(np.float32)
    return tensor.array


def largest_difference(reference: Outputs, outputs: Outputs) -> float:
    """Return how far any output is from its reference, as a part of the largest value of that one.

    1.0 or more where names, shapes or texts are others, or where only one of the two is finite.
    """
    worst = 0.0
    for before, after in zip(reference, outputs, strict=True):
        if set(before) != set(after):
            return 1.0
        for name, expected in before.items():
            worst = max(worst, _difference(expected, after[name]))
    return worst


def _difference(expected: npt.NDArray[Any], given: npt.NDArray[Any]) -> float:
    if expected.shape != given.shape:
        return 1.0
    if expected.dtype.kind not in "biuf" or given.dtype.kind not in "biuf":
        return 0.0 if bool((expected == given).all()) else 1.0
    if expected.size == 0:
        return 0.0
    first, second = expected.astype(np.float64), given.astype(np.float64)
    finite = np.isfinite(first)
    # Not finite in the same way: infinity is neither its opposite nor no number.
    if not np.array_equal(first[~finite], second[~np.isfinite(second)], equal_nan=True) or not np.array_equal(
        finite, np.isfinite(second)
    ):
        return 1.0
    if not finite.any():
        return 0.0
    scale = float(np.abs(first[finite]).max())
    distance = float(np.abs(first[finite] - second[finite]).max())
    return distance / scale if scale else float(distance > 0)
