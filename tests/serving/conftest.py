"""A serving core of its own: a timer, the service with the parts that load models, and a backend whose sessions run
functions of the test."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server import backends
from edge_server.backends.base import Array, Execution, OpenJob, RequestSession, Session, SessionInfo
from edge_server.config import LogConfig
from edge_server.core.model_spec import InputSpec, InstanceGroup, InstanceKind, ModelFile, ModelSpec, OutputSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.core.version_lifecycle import DesiredModel, DesiredVersion, Resolved
from edge_server.memory.shared_memory import SharedMemoryRegistry
from edge_server.service import InferenceService, Readiness
from edge_server.serving.cache.response_cache import ResponseCache
from edge_server.serving.execution import admission_control
from edge_server.serving.execution.gpu_state import Gpus
from edge_server.serving.execution.model_version import ModelVersion
from edge_server.serving.execution.rate_limiter import RateLimiter
from edge_server.serving.lifecycle.lifecycle_parts import make_lifecycle
from edge_server.serving.lifecycle.lifecycle_settings import LifecycleSettings
from edge_server.serving.lifecycle.reconciler import MemoryCheck
from edge_server.serving.timer import Timer
from edge_server.telemetry.log import LogSettings

TIMEOUT_S = 60.0
"""How long a test waits for what must happen; only a failing one waits that long."""


class Blocker:
    """Blocks threads until they are released, one by one."""

    def __init__(self) -> None:
        self._blocked = threading.Semaphore(0)
        self._released = threading.Semaphore(0)

    def block(self) -> None:
        self._blocked.release()
        assert self._released.acquire(timeout=TIMEOUT_S), "the thread was not released"

    def wait_blocked(self) -> None:
        assert self._blocked.acquire(timeout=TIMEOUT_S), "no thread was blocked"

    def release(self, count: int = 1) -> None:
        self._released.release(count)


class Script:
    """What the sessions of the backend `scripted` do, and what was done to them. Exchange the functions at will."""

    def __init__(self) -> None:
        self.on_open: Callable[[OpenJob], None] = lambda job: None
        self.on_run: Callable[[str, Mapping[str, Array]], Mapping[str, Array]] = lambda name, inputs: {
            "OUT": np.array(inputs["IN"])
        }
        self.on_close: Callable[[str], None] = lambda name: None
        self.on_execute: Callable[[Sequence[Execution]], None] | None = None
        self.info = SessionInfo("scripted", "CPU", "f32")
        self.is_repeatable = False
        self.opened: list[tuple[str, threading.Thread]] = []
        self.ran: list[tuple[str, threading.Thread, int]] = []
        self.closed: list[tuple[str, threading.Thread]] = []
        self.dropped: list[threading.Thread] = []

    def open(self, job: OpenJob) -> Session | RequestSession:
        self.on_open(job)
        self.opened.append((job.instance_name, threading.current_thread()))
        kind = ScriptedSession if self.on_execute is None else ScriptedRequestSession
        return kind(self, job.instance_name)


class _Scripted:
    def __init__(self, script: Script, name: str) -> None:
        self.info = script.info
        self._script = script
        self._name = name

    def __del__(self) -> None:
        self._script.dropped.append(threading.current_thread())

    def close(self) -> None:
        self._script.closed.append((self._name, threading.current_thread()))
        self._script.on_close(self._name)


class ScriptedSession(_Scripted, Session):
    @property
    def is_repeatable(self) -> bool:  # type: ignore[override]  # a constant in the base class
        return self._script.is_repeatable

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        rows = len(next(iter(inputs.values())))
        self._script.ran.append((self._name, threading.current_thread(), rows))
        return self._script.on_run(self._name, inputs)


class ScriptedRequestSession(_Scripted, RequestSession):
    def execute(self, executions: Sequence[Execution]) -> None:
        assert self._script.on_execute is not None
        self._script.on_execute(executions)


class Mailbox:
    """A sink that remembers, and that can be waited for."""

    def __init__(self) -> None:
        self.responses: list[Response] = []
        self.threads: list[threading.Thread] = []
        self._arrived = threading.Condition()

    def __call__(self, response: Response) -> None:
        with self._arrived:
            self.responses.append(response)
            self.threads.append(threading.current_thread())
            self._arrived.notify_all()

    def wait(self, count: int = 1) -> list[Response]:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.responses) >= count, TIMEOUT_S), "no answer came"
            return list(self.responses)

    def final(self) -> Response:
        with self._arrived:
            assert self._arrived.wait_for(lambda: bool(self.responses) and self.responses[-1].is_final, TIMEOUT_S), (
                "no final answer came"
            )
            return self.responses[-1]


class ScriptedCore:
    """Everything between the service and the sessions, for real."""

    def __init__(
        self,
        lifecycle: LifecycleSettings | None = None,
        check_memory: MemoryCheck | None = None,
        admission: admission_control.AdmissionControl = admission_control.ADMIT_ALL,
        limiter: RateLimiter | None = None,
        cache: ResponseCache | None = None,
        readiness: Readiness = Readiness.STRICT,
        *,
        has_started: bool = True,
        gpus: Gpus | None = None,
    ) -> None:
        self.script = Script()
        self.timer = Timer()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.without_fallback: list[str] = []
        """Reasons of models that lost their GPU and could not be loaded elsewhere."""
        self.models = make_lifecycle(
            self.timer,
            {},
            load_threads=2,
            publish=lambda kind, /, **fields: self.events.append((kind, fields)),
            settings=lifecycle,
            check_memory=check_memory,
            admission_control=admission,
            limiter=limiter,
            cache=cache,
            gpus=gpus,
            on_no_fallback=self.without_fallback.append,
        )
        self.table, self.router = self.models.table, self.models.router
        self.desired: dict[str, DesiredModel] = {}
        self.service = InferenceService(
            self.models, self, SharedMemoryRegistry(True), LogSettings(LogConfig()),
            server_id="edge-server", server_version="1", is_explicit=True, readiness=readiness,
        )  # fmt: skip
        if has_started:
            self.service.started()

    def names(self) -> list[str]:
        return list(self.desired)

    def passed_over(self) -> Mapping[str, str]:
        return {}

    def desired_model(
        self, name: str, config_json: str | None, files: Mapping[str, bytes], *, may_carry_code: bool = True
    ) -> DesiredModel | None:
        return self.desired.get(name)

    def with_pins(self, desired: Mapping[str, DesiredModel]) -> Mapping[str, DesiredModel]:
        return desired

    def versions(self, name: str) -> Sequence[int]:
        wish = self.desired.get(name)
        return sorted(wish.versions) if wish else []

    def pins(self) -> Mapping[str, int]:
        return {}

    def pin(self, name: str, version: int) -> int | None:
        raise AssertionError("no test of the serving core pins")

    def unpin(self, name: str) -> int | None:
        raise AssertionError("no test of the serving core pins")

    @property
    def pins_are_durable(self) -> bool:
        return False

    def spec(self, name: str = "m", *, instances: int = 1, backend: str = "scripted", **more: Any) -> ModelSpec:
        settings: dict[str, Any] = {
            "max_batch_size": 8,
            "inputs": (InputSpec("IN", DType.FP32, (-1,)),),
            "outputs": (OutputSpec("OUT", DType.FP32, (-1,)),),
            "instance_groups": (InstanceGroup(name, InstanceKind.CPU, instances),),
        } | more
        return ModelSpec(name=name, backend=backend, platform="", **settings)

    def desired_version(
        self, spec: ModelSpec, version: int = 1, mark: str = "a", root: Path = Path("/nowhere")
    ) -> DesiredVersion:
        model_dir = root / spec.name
        file = ModelFile(model_dir / str(version), model_dir, version)
        return DesiredVersion(mark, lambda passed_over: Resolved(spec, file))

    def set_desired(self, spec: ModelSpec, *versions: int, mark: str = "a", root: Path = Path("/nowhere")) -> None:
        wish = DesiredModel(spec.name, {v: self.desired_version(spec, v, mark, root) for v in versions or (1,)})
        self.desired[spec.name] = wish
        self.table.set_desired(wish)

    def load(self, spec: ModelSpec, *versions: int, mark: str = "a", root: Path = Path("/nowhere")) -> ModelVersion:
        self.set_desired(spec, *versions, mark=mark, root=root)
        assert self.table.wait_settled([spec.name], TIMEOUT_S)
        assert self.router.failure(spec.name) is None
        return self.router.route(spec.name, None)

    def request(self, value: float = 0.0, *, model: str = "m", rows: int = 1, width: int = 1, **more: Any) -> Request:
        array = np.full((rows, width), value, np.float32)
        return Request(model, {"IN": Tensor("IN", DType.FP32, array)}, **more)

    def block_runs(self, prefix: str = "") -> Blocker:
        """Stop every run of the instances whose names begin so, until the blocker that is returned lets it go on."""
        made, plain = Blocker(), self.script.on_run

        def run(name: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
            if name.startswith(prefix):
                made.block()
            return plain(name, inputs)

        self.script.on_run = run
        return made

    def block_loads(self) -> Blocker:
        """Stop every load, until the blocker that is returned lets it go on."""
        made = Blocker()
        self.script.on_open = lambda job: made.block()
        return made

    def submit(self, value: float = 0.0, *, may_run: bool = False, **more: Any) -> tuple[Any, Mailbox]:
        mailbox = Mailbox()
        return self.service.submit(self.request(value, **more), mailbox, hold_us=math.inf if may_run else 0.0), mailbox


@pytest.fixture
def new_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ScriptedCore]]:
    """Build a house with limits of its own, one in each test; it is torn down after the test."""
    # A hung session must not cost each test the whole grace; those that wait for it say so.
    monkeypatch.setattr("edge_server.service.CLOSE_TIMEOUT_S", 0.2)
    built: list[ScriptedCore] = []

    def build(
        check_memory: MemoryCheck | None = None,
        admission: admission_control.AdmissionControl = admission_control.ADMIT_ALL,
        limiter: RateLimiter | None = None,
        cache: ResponseCache | None = None,
        readiness: Readiness = Readiness.STRICT,
        has_started: bool = True,
        gpus: Gpus | None = None,
        **limits: Any,
    ) -> ScriptedCore:
        made = ScriptedCore(
            LifecycleSettings(**limits),
            check_memory,
            admission,
            limiter,
            cache,
            readiness,
            has_started=has_started,
            gpus=gpus,
        )
        monkeypatch.setitem(backends._made, "scripted", made.script)  # type: ignore[arg-type]
        built.append(made)
        return made

    yield build
    for made in built:
        made.service.close(0.0)
        made.timer.close()


@pytest.fixture
def core(new_core: Callable[..., ScriptedCore]) -> ScriptedCore:
    return new_core()


@pytest.fixture
def new_blocker() -> Callable[[], Blocker]:
    return Blocker


@pytest.fixture
def blocker(core: ScriptedCore) -> Iterator[Blocker]:
    """Stops every run of the scripted sessions."""
    made = core.block_runs()
    yield made
    made.release(10_000)


@pytest.fixture
def new_mailbox() -> Callable[[], Mailbox]:
    return Mailbox
