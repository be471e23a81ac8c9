"""Session of a model that computes batches, such as an ONNX file, in a child process: joins requests and splits results
there."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from edge_server.backends.base import Execution, RequestSession, Session
from edge_server.backends.runtime_errors import message_line
from edge_server.core.batch import BatchPlan
from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_check import RequestCheck
from edge_server.errors import BackendError, EdgeServerError

log = logging.getLogger(__name__)


class BatchSession(RequestSession):
    """Runs the requests of a batch in one run of a Session."""

    def __init__(self, spec: ModelSpec, session: Session) -> None:
        # The server reshapes the outputs for the client.
        as_computed = tuple(
            item if item.reshape is None else item._replace(dims=item.reshape, reshape=None) for item in spec.outputs
        )
        self._plan = BatchPlan(dataclasses.replace(spec, outputs=as_computed))
        self._check = RequestCheck(spec)
        self._session = session
        self.info = dataclasses.replace(session.info, is_bound=True, only_computes=False)

    def execute(self, executions: Sequence[Execution]) -> None:
        plan, requests = self._plan, [execution.request for execution in executions]
        try:
            item_counts = [self._check.count_items(request) for request in requests]
            outputs = self._session.run(plan.gather(requests), plan.output_names(requests))
            answers = plan.scatter(outputs, requests, item_counts)
        except Exception as error:  # noqa: BLE001 - it is the requests' error, and must not end the process
            failure = error.detached() if isinstance(error, EdgeServerError) else self._translated(error)
        else:
            for execution, answer in zip(executions, answers, strict=True):
                execution.send({tensor.name: tensor.array for tensor in answer}, is_final=True)
            return
        for execution in executions:
            execution.fail(failure)

    def _translated(self, error: Exception) -> BackendError:
        name = self._plan.spec.name
        log.error("model '%s': a batch failed in a way that its backend does not know", name, exc_info=error)
        return BackendError(f"model '{name}' failed: {type(error).__name__}: {message_line(error)}")

    def close(self) -> None:
        self._session.close()
