"""Session of a Python model in the server's process: converts requests, checks responses."""

from __future__ import annotations

import contextvars
import gc
import inspect
import logging
import platform
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from edge_server.backends.base import Array, Execution, OpenJob, RequestSession, SessionInfo
from edge_server.backends.python.calling_model import Batch, Host, current_batch, current_host, enter
from edge_server.backends.python.coroutine_loop import ModelLoop
from edge_server.backends.python.custom_metrics import REGISTRY
from edge_server.backends.python.deadlock_check import WaitGraph
from edge_server.backends.python.error_translation import RAISED, error_of, full_text, let_go, told
from edge_server.backends.python.module_loader import ModelModules, threads_of
from edge_server.backends.python.request import InferenceRequest
from edge_server.backends.python.response import COMPLETE_FINAL, InferenceResponse, ResponseTarget
from edge_server.backends.python.tensor import PbTensor
from edge_server.backends.python.thread_safety import needs_own_thread
from edge_server.backends.runtime_library import file_title, yes_or_no
from edge_server.core.batch import BatchPlan
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, EdgeServerError, LoadError

log = logging.getLogger(__name__)

WAITS: WaitGraph[Host] = WaitGraph()
"""Who waits for whom in this process."""

HEALTH_LIMIT_S = 5.0
"""How long a model's `is_ready` may take; Triton's number."""


class PythonSession(RequestSession):
    """Opened and closed on one thread, executed there too unless `threads` finds that it need not be. `waits` None: it
    is the one of a process, where calls that wait for themselves are found elsewhere."""

    def __init__(self, job: OpenJob, waits: WaitGraph[Host] | None = WAITS) -> None:
        spec = job.spec
        self._spec = spec
        self._version = job.file.version
        self._folder = job.file.model_dir
        self._plan = BatchPlan(spec)
        self._outputs = {item.name: item.dtype for item in spec.outputs}
        self._dropped: set[str] = set()
        self._source = ModelModules(job.file.path, job.file.model_dir, is_alone=waits is None)
        self._host = Host(spec.name, self._source.package, job.server, waits, folder=str(job.file.path.parent))
        self._is_iterative = spec.sequence is not None and spec.sequence.is_iterative
        self._is_read_only = yes_or_no(spec.name, spec.parameters, "read_only_inputs", False)
        self._loop = ModelLoop(f"{job.instance_name}-loop")
        self._health = HealthCheck()
        enter(self._host)
        if job.server is not None:
            job.server.add_metrics(REGISTRY.views)
        self._context = contextvars.copy_context()
        self._context.run(current_host.set, self._host)
        try:
            self._model = self._context.run(self._initialize, job)
            self._own_thread = self._needs_own_thread(job)
        except RAISED as error:
            self._unload()
            raise self._load_error(job, error) from None
        self.info = self._describe()
        self.has_health_check = hasattr(self._model, "is_ready")
        if waits is not None:
            waits.enter(spec.name, self._host)

    def execute(self, executions: Sequence[Execution]) -> None:
        self._context.run(self._execute, executions)

    def is_healthy(self) -> bool:
        """Ask the model's `is_ready`; one that raises, or takes longer than HEALTH_LIMIT_S, is not."""
        if not self.has_health_check:
            return True
        return self._health.ask(lambda: contextvars.copy_context().run(self._ask_ready))

    def close(self) -> None:
        """Let the model finish. What it leaves running is named in the log."""
        if not self._loop.close():
            log.warning("model '%s': a coroutine did not end when it was cancelled", self._spec.name)
        if hasattr(self._model, "finalize"):
            try:
                self._context.run(self._model.finalize)
            except RAISED as error:
                log.error("model '%s' failed to finalize: %s", self._spec.name, full_text(error))
                let_go(error)
        del self._model
        left = threads_of(self._source.package)
        if left:
            names = ", ".join(thread.name for thread in left)
            log.warning(
                "model '%s' was closed and left %d thread(s) running, which keep its memory: %s",
                self._spec.name, len(left), names,
            )  # fmt: skip
        self._unload()

    # -- opening and closing

    def _initialize(self, job: OpenJob) -> Any:
        module = self._source.load()
        kind = getattr(module, "TritonPythonModel", None)
        if kind is None:
            raise LoadError(f"{file_title(job.file)}: it has no class TritonPythonModel")
        model = kind()
        if not callable(getattr(model, "execute", None)):
            raise LoadError(f"{file_title(job.file)}: its TritonPythonModel has no method execute")
        if hasattr(model, "initialize"):
            model.initialize(initialize_arguments(job))
        return model

    def _needs_own_thread(self, job: OpenJob) -> str:
        """Return why the model executes on its instance's own thread, "" where it does not."""
        if self._host.waits is None:
            return "it has a process of its own"
        reason = needs_own_thread(self._spec, self._model.execute, job.file.path, self._source.has)
        self._host.may_wait = bool(reason)
        if reason:
            log.debug("model '%s' executes on a thread of its own: %s", self._spec.name, reason)
        return reason

    def _describe(self) -> SessionInfo:
        options = {"isolation": "none", "execution_thread": "own" if self._own_thread else "caller"}
        return SessionInfo(
            f"python {platform.python_version()}",
            "CPU",
            "as the model says",
            options,
            keeps_thread=bool(self._own_thread),
            only_computes=not self._own_thread,
        )

    def _load_error(self, job: OpenJob, error: BaseException) -> LoadError:
        """Return the error message. The traceback is logged and not kept, because its frames hold the model."""
        if isinstance(error, LoadError):
            return error.detached()
        log.error("%s failed to open: %s", file_title(job.file), full_text(error))
        found = LoadError(f"{file_title(job.file)}: {told(error, self._folder)}")
        let_go(error)
        return found

    def _unload(self) -> None:
        if self._host.waits is not None:
            self._host.waits.leave(self._spec.name, self._host)
        self._source.unload()
        self._context = contextvars.Context()
        # A module and its functions refer to each other; what they hold may be gigabytes, or a GPU's.
        gc.collect()

    def _ask_ready(self) -> bool:
        current_host.set(self._host)
        return bool(self._model.is_ready())

    # -- one batch

    def _execute(self, executions: Sequence[Execution]) -> None:
        requests = [self._receive(execution) for execution in executions]
        replies = [request.reply for request in requests]
        batch = Batch(self._host, executions)
        token = current_batch.set(batch)
        try:
            answers = self._model.execute(requests)
            if inspect.iscoroutine(answers):
                if self._spec.is_decoupled:
                    batch.holds_instance = False
                    self._finish_later(answers, requests, executions)
                    return
                answers = self._loop.start(answers).result()
            self._answer(answers, requests)
        except RAISED as error:
            self._fail_all(error, replies, executions)
        finally:
            current_batch.reset(token)

    def _receive(self, execution: Execution) -> InferenceRequest:
        request = execution.request
        inputs = []
        for name, array in self._plan.inputs_of(request).items():
            if self._is_read_only:
                array = array.view()
                array.flags.writeable = False
            inputs.append(PbTensor.received(name, request.inputs[name].dtype, array, is_lent=not self._is_read_only))
        reply = ResponseTarget(
            lambda response, is_final: self._send(execution, response, is_final),
            lambda text: execution.fail(self._error(execution, text)),
            execution.is_cancelled,
            is_decoupled=self._spec.is_decoupled,
            run_again=execution.reschedule if self._is_iterative else None,
        )
        outputs = request.outputs or tuple(self._outputs)
        return InferenceRequest.received(request, inputs, outputs, self._version, self._host, reply)

    def _answer(self, answers: Any, requests: Sequence[InferenceRequest]) -> None:
        """Send what `execute` returned. Raises BackendError for what fails the whole batch."""
        if self._spec.is_decoupled:
            if answers is not None:
                raise self._wrong("is decoupled, so execute must return None", answers)
            answers = [None] * len(requests)
        elif answers is None:
            answers = [None] * len(requests)
        elif not isinstance(answers, list | tuple):
            raise self._wrong("execute must return a list", answers)
        elif len(answers) != len(requests):
            raise BackendError(
                f"model '{self._spec.name}': execute returned {len(answers)} responses to {len(requests)} requests; "
                "expected one for each, in their order"
            )
        for request, answer in zip(requests, answers, strict=True):
            self._answer_one(request, answer)

    def _answer_one(self, request: InferenceRequest, answer: Any) -> None:
        reply = request.reply
        if request.comes_again:
            if answer is not None:
                reply.fail("execute must return None for a request that it reschedules")
            elif reply.is_closed:
                log.warning("model '%s' reschedules a request that it has answered: it does not come again",
                            self._spec.name)  # fmt: skip
            reply.run_again()
        elif answer is None:
            if not reply.has_sender:
                reply.abandon()
        elif isinstance(answer, InferenceResponse) and not reply.is_closed:
            reply.send(answer, COMPLETE_FINAL)
        elif not reply.is_closed:
            reply.fail(f"execute must return an InferenceResponse for each request, got {type(answer).__name__}")

    def _send(self, execution: Execution, response: InferenceResponse | None, is_final: bool) -> None:
        if response is None:
            execution.finish()
            return
        error = response.error()
        if error is not None:
            execution.fail(error_of(error), is_final=is_final)
            return
        try:
            outputs = self._checked(execution, response)
        except EdgeServerError as problem:
            execution.fail(problem)
            return
        if response.parameter_map:
            execution.send(outputs, is_final=is_final, parameters=response.parameter_map)
        else:
            execution.send(outputs, is_final=is_final)

    def _checked(self, execution: Execution, response: InferenceResponse) -> Mapping[str, Array]:
        """Return the tensors that were asked for. Raises BackendError for one of another type than promised."""
        wanted = execution.request.outputs
        found: dict[str, Array] = {}
        for tensor in response.output_tensors():
            name = tensor.name()
            promised = self._outputs.get(name)
            if promised is None:
                self._tell_dropped(name)
                continue
            if wanted and name not in wanted:
                continue
            if name in found:
                raise self._error(execution, f"output '{name}' is there twice in one response")
            if tensor.dtype is not promised and (promised, tensor.dtype) != (DType.BF16, DType.UINT16):
                raise self._error(
                    execution,
                    f"output '{name}' has elements of type {tensor.dtype.value}, "
                    f"but the configuration promises {promised.value}",
                )
            try:
                found[name] = tensor.take()
            except ValueError as error:
                raise self._error(execution, f"output '{name}': {error}") from None
        return found

    def _tell_dropped(self, name: str) -> None:
        if name not in self._dropped:
            self._dropped.add(name)
            log.warning("model '%s' answers '%s', which its configuration does not declare: left out",
                        self._spec.name, name)  # fmt: skip

    def _finish_later(
        self, work: Coroutine[Any, Any, Any], requests: Sequence[InferenceRequest], executions: Sequence[Execution]
    ) -> None:
        """Let a coroutine of a decoupled model run on, and take the next batch meanwhile."""

        def end(future: Future[Any]) -> None:
            try:
                self._answer(future.result(), requests)
            except RAISED as error:
                self._fail_all(error, [request.reply for request in requests], executions)

        future = self._loop.start(work)
        future.add_done_callback(end)

    def _fail_all(
        self, error: BaseException, replies: Sequence[ResponseTarget], executions: Sequence[Execution]
    ) -> None:
        small: EdgeServerError
        if isinstance(error, EdgeServerError):
            small = error.detached()
        else:
            log.error("model '%s' failed: %s", self._spec.name, full_text(error))
            small = BackendError(f"model '{self._spec.name}': {told(error, self._folder)}")
        for reply, execution in zip(replies, executions, strict=True):
            if not reply.is_closed:
                reply.is_closed = True
                execution.fail(small)
        # Only now: what the frames held may be the senders, which answer for themselves when they are dropped.
        let_go(error)

    def _wrong(self, expected: str, given: object) -> BackendError:
        return BackendError(f"model '{self._spec.name}': {expected}, got {type(given).__name__}")

    def _error(self, execution: Execution, text: str) -> BackendError:
        name = execution.request.id
        which = f", request '{name}'" if name else ""
        return BackendError(f"model '{self._spec.name}'{which}: {text}")


class HealthCheck:
    """Asks a question that may hang, on threads of its own. Who comes while it is being asked gets the same answer;
    once one has waited in vain the answer is no for as long as the question hangs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: _Asked | None = None

    def ask(self, question: Any, limit_s: float = HEALTH_LIMIT_S) -> bool:
        with self._lock:
            asked = self._asked
            if asked is None or not asked.is_alive():
                asked = self._asked = _Asked(question)
                try:
                    asked.start()
                except RuntimeError:  # the system grants no further thread
                    return False
            elif asked.is_late:
                return False
        asked.join(limit_s)
        asked.is_late = asked.is_alive()
        return asked.answer and not asked.is_late


class _Asked(threading.Thread):
    def __init__(self, question: Any) -> None:
        super().__init__(name="is-ready", daemon=True)
        self._question = question
        self.answer = False
        self.is_late = False

    def run(self) -> None:
        try:
            self.answer = self._question()
        except RAISED as error:
            log.error("is_ready failed: %s", full_text(error))
        finally:
            del self._question


def initialize_arguments(job: OpenJob) -> dict[str, str]:
    """Return the arguments of `initialize` as in Triton: all of them strings."""
    return {
        "model_config": job.spec.config_json,
        "model_instance_kind": "CPU" if job.device_id is None else "GPU",
        "model_instance_name": job.instance_name,
        "model_instance_device_id": str(job.device_id or 0),
        "model_repository": str(job.file.model_dir),
        "model_version": str(job.file.version),
        "model_name": job.spec.name,
    }
