"""Measurement of the configurations that `edge-server analyze` tries: starts a server with each one on free ports, and
measures it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_server.child_command import child_command
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import EdgeServerError, InvalidRequest
from edge_server.plugins.tuning.clients.client_interface import MeasuredRequest, RequestRefused, Unreachable
from edge_server.plugins.tuning.clients.grpc_client import GrpcControl, raw_outputs, write_grpc
from edge_server.plugins.tuning.clients.http_client import HttpControl
from edge_server.plugins.tuning.load.configuration_search import TrialOutcome
from edge_server.plugins.tuning.load.input_data import InputChoice, make_inputs
from edge_server.plugins.tuning.load.measure_until_stable import MeasurementTimes
from edge_server.plugins.tuning.load.measurement_results import MeasuredPoint
from edge_server.plugins.tuning.load.measurement_session import LoadSession, MeasuredServer
from edge_server.plugins.tuning.load.model_config_candidates import ServerCandidate, apply_candidate
from edge_server.protocol.raw_tensors import tensor_from_raw
from edge_server.repository.disk.safe_paths import check_relative, find_inside
from edge_server.repository.model_config.pbtxt import ConfigMessage, new_config, read_file

_READY = re.compile(r"edge-server \S+ is ready: HTTP (http://[^;\s]+); gRPC ([^;\s]+)")
_STOP_S = 15.0
_REASON_LINES = 3
_LABELS = "label_filename of an output"

Outputs = list[dict[str, npt.NDArray[Any]]]


class NotLoaded(RequestRefused):
    """The server runs, but the model does not load with this configuration."""


class Interrupts:
    """Context manager that raises KeyboardInterrupt for SIGINT and SIGTERM, but only inside `allowed` blocks.

    A signal at another time stays pending until the next `allowed` block. So no exception interrupts cleanup, or comes
    between the creation of a resource and the `try` that removes it. Use in the main thread only.
    """

    def __init__(self) -> None:
        self.is_pending = False
        """Whether a signal arrived and has not been raised."""
        self._is_allowed = False
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous_handlers[number] = signal.signal(number, self._handle_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Raise signals inside this block. Raise a pending signal at once."""
        self._is_allowed = True
        try:
            if self.is_pending:
                self.is_pending = self._is_allowed = False
                raise KeyboardInterrupt
            yield
        finally:
            self._is_allowed = False

    def _handle_signal(self, _: int, __: FrameType | None) -> None:
        if self._is_allowed:
            # A second exception would interrupt the cleanup.
            self._is_allowed = False
            raise KeyboardInterrupt
        self.is_pending = True


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model in a repository. `config` is its config.pbtxt, or empty without one."""

    path: Path
    config: ConfigMessage

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def open(cls, repository: Path, name: str) -> ModelFolder:
        """Read a model's configuration. Raises InvalidRequest if the model is missing, BadModelConfig if invalid."""
        path = repository / name
        if "/" in name or name in ("", ".", "..") or not path.is_dir():
            raise InvalidRequest(f"there is no model '{name}' in {repository}")
        file = path / "config.pbtxt"
        config = read_file(file, name) if file.is_file() else new_config()
        return cls(path.resolve(), config)


@dataclass
class PrivateServer:
    """A server process for one model and one configuration. `log` is its standard error, `tail` its standard output."""

    process: subprocess.Popen[str]
    log: Path
    url: str = ""
    address: str = ""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=40))

    def last_output(self) -> str:
        """Return the last lines of the log, or of the output, or the exit code."""
        lines = self.log.read_text(errors="replace").splitlines() or list(self.tail)
        return " / ".join(lines[-_REASON_LINES:]) or f"it ended with {self.process.returncode}"


@contextlib.contextmanager
def private_server(
    model: ModelFolder, config: ConfigMessage, start_s: float, interrupts: Interrupts
) -> Iterator[PrivateServer]:
    """Start a server for the model and stop it at the end. Raises Unreachable.

    The other models of the repository are visible too, because the model may call them. At the end the process is
    stopped and its folder removed, also after an error. Interrupts are allowed while the server runs.
    """
    with tempfile.TemporaryDirectory(prefix="edge-analyze-") as folder:
        repository = _build_repository(model, config, Path(folder) / "models")
        log = Path(folder) / "log"
        command = child_command(
            "edge_server", "serve", f"--model-repository={repository}",
            "--model-control-mode=explicit", f"--load-model={model.name}", "--allow-external-links=true",
            "--http-port=0", "--grpc-port=0", "--allow-metrics=false", "--log-info=false", "--exit-on-error=false",
            "--http-address=127.0.0.1", "--grpc-address=127.0.0.1",
        )  # fmt: skip
        with log.open("w") as errors:
            # In a new session, so that Ctrl-C reaches only this process, which then stops the server.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        server = PrivateServer(process, log)
        try:
            with interrupts.allowed():
                _wait_until_ready(server, start_s)
                yield server
        finally:
            _stop_server(process)


def _build_repository(model: ModelFolder, config: ConfigMessage, repository: Path) -> Path:
    """Create a repository of links to the real one, with a changed configuration of the model.

    Raises BadModelConfig if a label file is missing or outside the model's folder.
    """
    model_folder = repository / model.name
    model_folder.mkdir(parents=True)
    # Label files are copied, because the server rejects a link to a label file outside the model's folder.
    copied = {check_relative(output.label_filename, _LABELS) for output in config.output if output.label_filename}
    for item in model.path.iterdir():
        # A configuration variant would take precedence, and the checksums do not match the changed files.
        if item.name not in ("config.pbtxt", "configs", "SHA256SUMS", "SHA256SUMS.sig"):
            excluded = {path.relative_to(item.name) for path in copied if path.parts[0] == item.name}
            _link_item(item, model_folder / item.name, excluded)
    for name in copied:
        shutil.copyfile(find_inside(model.path, str(name), _LABELS), model_folder / name)
    for other in model.path.parent.iterdir():
        if other.is_dir() and other.name != model.name:
            (repository / other.name).symlink_to(other)
    served = type(config)()
    served.CopyFrom(config)
    # Agents verify checksums and reject links. They do not affect what is measured.
    served.ClearField("model_repository_agents")
    (model_folder / "config.pbtxt").write_text(str(served), encoding="utf-8")
    return repository


def _link_item(item: Path, link: Path, excluded: set[PurePosixPath]) -> None:
    """Link to a file or folder. A folder with excluded paths becomes a real folder with links to the other entries."""
    if not excluded:
        link.symlink_to(item)
    elif PurePosixPath() not in excluded:
        link.mkdir()
        for inner in item.iterdir():
            _link_item(
                inner,
                link / inner.name,
                {path.relative_to(inner.name) for path in excluded if path.parts[0] == inner.name},
            )


def _wait_until_ready(server: PrivateServer, start_s: float) -> None:
    assert server.process.stdout is not None
    # Killing a server that hangs at start also ends the read below.
    timer = threading.Timer(start_s, _kill_all, (server.process,))
    try:
        # Inside `try`: after an interrupt, a running timer would delay the exit of this process for minutes.
        timer.start()
        for line in server.process.stdout:
            server.tail.append(line.rstrip())
            found = _READY.match(line)
            if found:
                server.url, server.address = found[1], found[2]
                threading.Thread(target=_drain_output, args=(server,), daemon=True).start()
                return
    finally:
        timer.cancel()
    server.process.wait()
    server.process.stdout.close()
    raise Unreachable(f"the server did not start: {server.last_output()}")


def _stop_server(process: subprocess.Popen[str]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    _kill_all(process)
    process.wait()


def _kill_all(process: subprocess.Popen[str]) -> None:
    """Kill the server and the processes that its models started, which would keep the output pipe open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _drain_output(server: PrivateServer) -> None:
    """Read the server's output until it exits. An unread pipe would fill up and block the server."""
    assert server.process.stdout is not None
    with server.process.stdout as lines:
        server.tail.extend(lines)


@dataclass
class Trials:
    """Measures candidates one after the other. The outputs of the default configuration are the numeric reference."""

    model: ModelFolder
    backend: str
    concurrencies: Sequence[int]
    choice: InputChoice
    times: MeasurementTimes
    interrupts: Interrupts
    limit_ms: float | None = None
    start_s: float = 120.0
    on_trial: Callable[[ServerCandidate, int], None] | None = None
    reference: Outputs | None = None
    unloadable: dict[tuple[str, str], str] = field(default_factory=dict)
    """(backend, precision) -> why it does not load. Its variants with other thread counts are then skipped."""

    def run(self, candidate: ServerCandidate, round_number: int) -> TrialOutcome:
        """Serve and measure a candidate, and compare its outputs. Each round takes twice as long as the last one.

        Failures are reported in the outcome's `problem`.
        """
        if self.on_trial is not None:
            self.on_trial(candidate, round_number)
        kind = (candidate.backend, candidate.precision)
        if kind in self.unloadable:
            return TrialOutcome(candidate, problem=self.unloadable[kind], round=round_number)
        config = apply_candidate(candidate, self.model.config, self.backend)
        try:
            with private_server(self.model, config, self.start_s, self.interrupts) as server:
                return self._measure(server, candidate, round_number)
        except NotLoaded as error:
            if candidate.precision:
                self.unloadable[kind] = error.message
            return TrialOutcome(candidate, problem=error.message, round=round_number)
        except EdgeServerError as error:
            return TrialOutcome(candidate, problem=error.message, round=round_number)

    def _measure(self, server: PrivateServer, candidate: ServerCandidate, round_number: int) -> TrialOutcome:
        http = HttpControl(server.url, (), 30.0)
        model_info = served_model(http, self.model.name)
        target = MeasuredServer("grpc", server.address)
        control = GrpcControl(target.address, (), target.timeout_s)
        times = replace(self.times, window_s=self.times.window_s * 2**round_number)
        session = LoadSession(target, control.model(self.model.name, ""), control, times)
        session.pid = server.process.pid
        session.batch = self.choice.batch
        session.steps = make_inputs(session.model, self.choice)
        session.power_w = lambda: http.request_json("/edge/v1/governor").get("power_w")
        if http.request_json("/edge/v1/governor").get("power_w") is None:
            session.power_w = None
        outputs = self._outputs(control, session)
        if self.reference is None and candidate.is_default:
            self.reference = outputs
        points: list[MeasuredPoint] = []
        for concurrency in self.concurrencies:
            points.append(session.at_concurrency(concurrency))
            # A higher concurrency only increases the latency.
            if self.limit_ms is not None and points[-1].percentiles_ms[50] > self.limit_ms:
                break
        difference = None if self.reference is None else largest_difference(self.reference, outputs)
        return TrialOutcome(
            candidate,
            points,
            difference,
            model_info.get("runtime", ""),
            model_info.get("precision", ""),
            round=round_number,
        )

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


def served_model(http: HttpControl, name: str) -> dict[str, Any]:
    """Return the server's description of the model. Raises NotLoaded with the reason if it is not served."""
    for item in http.request_json("/edge/v1/models")["models"]:
        if item["name"] == name:
            return dict(item)
    index = http.request_json("/v2/repository/index", {})
    reasons = [item.get("reason", "") for item in index if item["name"] == name]
    raise NotLoaded(next((reason for reason in reasons if reason), f"model '{name}' did not load"))


def as_numbers(tensor: Tensor) -> npt.NDArray[Any]:
    """Return the values of an output for comparison: BF16 as float32, all others unchanged."""
    if tensor.dtype is DType.BF16:
        return (tensor.array.astype(np.uint32) << 16).view(np.float32)
    return tensor.array


def largest_difference(reference: Outputs, outputs: Outputs) -> float:
    """Return the largest difference of any output from its reference, relative to the reference's largest value.

    The result is at least 1.0 if names, shapes or texts differ, or if only one of two values is finite.
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
    # Values that are not finite must be equal: inf differs from -inf and from NaN.
    if not np.array_equal(first[~finite], second[~np.isfinite(second)], equal_nan=True) or not np.array_equal(
        finite, np.isfinite(second)
    ):
        return 1.0
    if not finite.any():
        return 0.0
    scale = float(np.abs(first[finite]).max())
    distance = float(np.abs(first[finite] - second[finite]).max())
    return distance / scale if scale else float(distance > 0)
