"""One instance of a Python model in this process: converts requests for `execute`, and checks its responses."""

from __future__ import annotations

import contextvars
import gc
import inspect
import logging
import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from edge_server.backends.base import Array, Execution, OpenJob, RequestSession, SessionInfo
from edge_server.backends.custom_metrics import REGISTRY
from edge_server.backends.deadlock_check import WAIT_GRAPH, WaitGraph
from edge_server.backends.option_parsers import yes_or_no
from edge_server.backends.running_batch import RunningBatch, current_batch
from edge_server.backends.runtime_errors import file_title
from edge_server.core.batch import BatchPlan
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, EdgeServerError, LoadError, OutOfMemory, WrongOutput
from edge_server.plugins.python_models.coroutine_loop import CoroutineLoop
from edge_server.plugins.python_models.error_translation import (
    MODEL_EXCEPTIONS,
    error_line,
    log_failure,
    release_frames,
    to_server_error,
)
from edge_server.plugins.python_models.execution_thread_choice import needs_own_thread
from edge_server.plugins.python_models.health_check import HealthCheck
from edge_server.plugins.python_models.model_context import (
    CallingModel,
    current_model,
    register_model,
)
from edge_server.plugins.python_models.module_loader import ModelModules, threads_of
from edge_server.plugins.python_models.request import InferenceRequest
from edge_server.plugins.python_models.response import COMPLETE_FINAL, InferenceResponse, ResponseTarget
from edge_server.plugins.python_models.tensor import PbTensor

log = logging.getLogger(__name__)


class PythonSession(RequestSession):
    """One model, opened and closed on one thread. `execute` runs on that thread, or on any (see
    `execution_thread_choice`).

    `wait_graph` is None in a process of the model's own, where the server detects deadlocks.
    """

    def __init__(self, job: OpenJob, wait_graph: WaitGraph | None = WAIT_GRAPH) -> None:
        spec = job.spec
        self._spec = spec
        self._version = job.file.version
        self._folder = job.file.model_dir
        self._plan = BatchPlan(spec)
        self._outputs = {item.name: item.dtype for item in spec.outputs}
        self._undeclared: set[str] = set()
        """Names of outputs that were left out and logged, because the configuration does not declare them."""
        self._modules = ModelModules(job.file.path, job.file.model_dir, is_alone=wait_graph is None)
        folder = str(job.file.path.parent)
        self._caller = CallingModel(spec.name, self._modules.package, job.server, wait_graph, folder=folder)
        self._is_iterative = spec.sequence is not None and spec.sequence.is_iterative
        self._is_read_only = yes_or_no(spec.name, spec.parameters, "read_only_inputs", False)
        self._loop = CoroutineLoop(f"{job.instance_name}-loop")
        self._health = HealthCheck()
        register_model(self._caller)
        if job.server is not None:
            job.server.add_metrics(REGISTRY.views)
        self._context = contextvars.copy_context()
        self._context.run(current_model.set, self._caller)
        own_thread = "it has a process of its own"
        try:
            self._model = self._context.run(self._initialize, job)
            if wait_graph is not None:
                own_thread = needs_own_thread(spec, self._model.execute, job.file.path, self._modules.has)
                self._caller.may_call_models = bool(own_thread)
                if own_thread:
                    log.debug("model '%s' executes on a thread of its own: %s", spec.name, own_thread)
        except MODEL_EXCEPTIONS as error:
            self._unload()
            if isinstance(error, LoadError):
                raise error.detached() from None
            # The traceback goes to the log as text. Its frames, which hold the model, are released.
            log_failure(log, f"{file_title(job.file)} failed to open", error)
            kind = OutOfMemory if isinstance(error, MemoryError) else LoadError
            failure = kind(f"{file_title(job.file)}: {error_line(error, self._folder)}")
            release_frames(error)
            raise failure from None
        self.info = SessionInfo(
            f"python {platform.python_version()}",
            "CPU",
            "as the model says",
            {"isolation": "none", "execution_thread": "own" if own_thread else "caller"},
            keeps_thread=bool(own_thread),
            only_computes=not own_thread,
        )
        self.has_health_check = hasattr(self._model, "is_ready")
        if wait_graph is not None:
            wait_graph.add_instance(spec.name, self._caller)

    def execute(self, executions: Sequence[Execution]) -> None:
        self._context.run(self._execute, executions)

    def is_healthy(self) -> bool:
        """Return the result of the model's `is_ready`; False if it raises, returns no bool, or needs
        longer than HEALTH_LIMIT_S."""
        if not self.has_health_check:
            return True

        def check() -> bool:
            current_model.set(self._caller)
            answer = self._model.is_ready()
            if not isinstance(answer, bool):
                raise TypeError(f"is_ready must return True or False, got {type(answer).__name__}")
            return answer

        return self._health.is_healthy(lambda: contextvars.copy_context().run(check))

    def close(self) -> None:
        """Finalize the model and unload its modules. Threads that it leaves running are named in the log."""
        if not self._loop.close():
            log.warning("model '%s': a coroutine did not end when it was cancelled", self._spec.name)
        if hasattr(self._model, "finalize"):
            try:
                self._context.run(self._model.finalize)
            except MODEL_EXCEPTIONS as error:
                log_failure(log, f"model '{self._spec.name}' failed to finalize", error)
                release_frames(error)
        del self._model
        left = threads_of(self._modules.package)
        if left:
            names = ", ".join(thread.name for thread in left)
            log.warning(
                "model '%s' was closed and left %d thread(s) running, which keep its memory: %s",
                self._spec.name, len(left), names,
            )  # fmt: skip
        self._unload()

    # -- opening and closing

    def _initialize(self, job: OpenJob) -> Any:
        module = self._modules.load()
        kind = getattr(module, "TritonPythonModel", None)
        if kind is None:
            raise LoadError(f"{file_title(job.file)}: it has no class TritonPythonModel")
        model = kind()
        if not callable(getattr(model, "execute", None)):
            raise LoadError(f"{file_title(job.file)}: its TritonPythonModel has no method execute")
        if hasattr(model, "initialize"):
            model.initialize(initialize_arguments(job))
        return model

    def _unload(self) -> None:
        if self._caller.wait_graph is not None:
            self._caller.wait_graph.remove_instance(self._spec.name, self._caller)
        self._modules.unload()
        self._context = contextvars.Context()
        # A module and its functions refer to each other, and may hold gigabytes of host or GPU memory.
        gc.collect()

    # -- one batch

    def _execute(self, executions: Sequence[Execution]) -> None:
        requests = [self._to_pb_request(execution) for execution in executions]
        targets = [request.target for request in requests]
        batch = RunningBatch(executions)
        token = current_batch.set(batch)
        try:
            answers = self._model.execute(requests)
            if inspect.iscoroutine(answers):
                if self._spec.is_decoupled:
                    # The coroutine runs on while the instance takes the next batch.
                    batch.holds_instance = False
                    future = self._loop.start(answers)
                    future.add_done_callback(lambda done: self._finish_coroutine(done, requests, executions))
                    return
                answers = self._loop.start(answers).result()
            self._answer(answers, requests)
        except MODEL_EXCEPTIONS as error:
            self._fail_all(error, targets, executions)
        finally:
            current_batch.reset(token)

    def _finish_coroutine(
        self, future: Future[Any], requests: Sequence[InferenceRequest], executions: Sequence[Execution]
    ) -> None:
        try:
            self._answer(future.result(), requests)
        except MODEL_EXCEPTIONS as error:
            self._fail_all(error, [request.target for request in requests], executions)

    def _to_pb_request(self, execution: Execution) -> InferenceRequest:
        request = execution.request
        inputs = []
        for name, array in self._plan.inputs_of(request).items():
            if self._is_read_only:
                array = array.view()
                array.flags.writeable = False
            inputs.append(PbTensor.received(name, request.inputs[name].dtype, array, is_lent=not self._is_read_only))
        target = ResponseTarget(
            lambda response, is_final: self._send(execution, response, is_final),
            lambda text, error_type: execution.fail(self._error(execution, text, error_type)),
            execution.is_cancelled,
            is_decoupled=self._spec.is_decoupled,
            run_again=execution.reschedule if self._is_iterative else None,
        )
        outputs = request.outputs or tuple(self._outputs)
        return InferenceRequest.received(request, inputs, outputs, self._version, self._caller, target)

    def _answer(self, answers: Any, requests: Sequence[InferenceRequest]) -> None:
        """Send the return value of `execute`. Raises WrongOutput for a value that fails the whole batch."""
        if self._spec.is_decoupled:
            if answers is not None:
                raise self._wrong_type("is decoupled, so execute must return None", answers)
            answers = [None] * len(requests)
        elif answers is None:
            answers = [None] * len(requests)
        elif not isinstance(answers, list | tuple):
            raise self._wrong_type("execute must return a list", answers)
        elif len(answers) != len(requests):
            raise WrongOutput(
                f"model '{self._spec.name}': execute returned {len(answers)} responses to {len(requests)} requests; "
                "expected one for each, in their order"
            )
        for request, answer in zip(requests, answers, strict=True):
            self._answer_one(request, answer)

    def _answer_one(self, request: InferenceRequest, answer: Any) -> None:
        target = request.target
        if request.is_rescheduled:
            if answer is not None:
                target.fail("execute must return None for a request that it reschedules")
            elif target.is_closed:
                log.warning("model '%s' reschedules a request that it has answered: it does not come again",
                            self._spec.name)  # fmt: skip
            target.run_again()
        elif answer is None:
            if target.has_sender:
                return
            if target.is_decoupled:
                target.abandon()
            else:
                target.fail(
                    "execute returned None instead of an InferenceResponse; expected a list with one for each request",
                    WrongOutput,
                )
        elif isinstance(answer, InferenceResponse) and not target.is_closed:
            target.send(answer, COMPLETE_FINAL)
        elif not target.is_closed:
            target.fail(
                f"execute must return an InferenceResponse for each request, got {type(answer).__name__}", WrongOutput
            )

    def _send(self, execution: Execution, response: InferenceResponse | None, is_final: bool) -> None:
        if response is None:
            execution.finish()
            return
        error = response.error()
        if error is not None:
            execution.fail(to_server_error(error), is_final=is_final)
            return
        try:
            outputs = self._requested_outputs(execution, response)
        except EdgeServerError as problem:
            execution.fail(problem)
            return
        if response.parameter_map:
            execution.send(outputs, is_final=is_final, parameters=response.parameter_map)
        else:
            execution.send(outputs, is_final=is_final)

    def _requested_outputs(self, execution: Execution, response: InferenceResponse) -> Mapping[str, Array]:
        """Return the requested tensors. Raises BackendError for one that cannot be answered."""
        wanted = execution.request.outputs
        found: dict[str, Array] = {}
        for tensor in response.output_tensors():
            name = tensor.name()
            promised = self._outputs.get(name)
            if promised is None:
                if name not in self._undeclared:
                    self._undeclared.add(name)
                    log.warning("model '%s' answers '%s', which its configuration does not declare: left out",
                                self._spec.name, name)  # fmt: skip
                continue
            if wanted and name not in wanted:
                continue
            if name in found:
                raise self._error(execution, f"output '{name}' is there twice in one response")
            if tensor.dtype is DType.BF16 and promised is not DType.BF16:
                # numpy has no such type: the server would take its values for UINT16.
                raise self._error(
                    execution,
                    f"output '{name}' has elements of type BF16, but its configuration promises {promised.value}",
                    WrongOutput,
                )
            try:
                found[name] = tensor.take()
            except ValueError as error:
                raise self._error(execution, f"output '{name}': {error}") from None
        return found

    def _fail_all(
        self, error: BaseException, targets: Sequence[ResponseTarget], executions: Sequence[Execution]
    ) -> None:
        small: EdgeServerError
        if isinstance(error, EdgeServerError):
            small = error.detached()
        else:
            log_failure(log, f"model '{self._spec.name}' failed", error)
            small = BackendError(f"model '{self._spec.name}': {error_line(error, self._folder)}")
        for target, execution in zip(targets, executions, strict=True):
            if not target.is_closed:
                target.is_closed = True
                execution.fail(small)
        # Last: the frames may hold response senders, which fail their requests when they are dropped.
        release_frames(error)

    def _wrong_type(self, expected: str, given: object) -> WrongOutput:
        return WrongOutput(f"model '{self._spec.name}': {expected}, got {type(given).__name__}")

    def _error(self, execution: Execution, text: str, error_type: type[BackendError] = BackendError) -> BackendError:
        name = execution.request.id
        which = f", request '{name}'" if name else ""
        return error_type(f"model '{self._spec.name}'{which}: {text}")


def initialize_arguments(job: OpenJob) -> dict[str, str]:
    """Return the dict that Triton passes to `initialize`. All values are text."""
    return {
        "model_config": job.spec.config_json,
        "model_instance_kind": "CPU" if job.device_id is None else "GPU",
        "model_instance_name": job.instance_name,
        "model_instance_device_id": str(job.device_id or 0),
        "model_repository": str(job.file.model_dir),
        "model_version": str(job.file.version),
        "model_name": job.spec.name,
    }
