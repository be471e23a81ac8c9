"""Run of one batch of sequence requests: adds the control and state tensors, and keeps the states for the next
request."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np

from edge_server.backends.base import Array, Execution, RequestSession, Session
from edge_server.core.batch import BatchPlan
from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import NO_PARAMETERS, Parameter, Request
from edge_server.core.sequence_batcher import SequenceEntry, SequenceTurn
from edge_server.core.shape_tensors import batched_shape_inputs, batched_shape_outputs, replace_batch_size
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BackendError, EdgeServerError
from edge_server.serving.execution.counters import VersionCounters
from edge_server.serving.execution.executor import BatchExecutor, LiveExecution
from edge_server.serving.execution.scheduler import Scheduler
from edge_server.serving.execution.ticket import Ticket
from edge_server.serving.sequence.control_tensors import Controls, StateTensors, blank, step_of


class SequenceBatch(list[Ticket]):
    """The tickets of a batch with their sequence entries."""

    def __init__(self, turn: SequenceTurn[Ticket]) -> None:
        super().__init__(turn.items)
        self.entries = turn.entries
        self.row_count = turn.row_count

    def clear(self) -> None:
        super().clear()
        self.entries = []


class SequenceExecutor(BatchExecutor):
    """Runs batches of one version. `states` must be loaded before the first one."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: BatchPlan,
        counters: VersionCounters,
        scheduler: Scheduler,
        controls: Controls,
        states: StateTensors,
    ) -> None:
        super().__init__(spec, plan, counters, scheduler)
        self._controls = controls
        self._states = states
        self._shape_inputs = batched_shape_inputs(spec)
        self._shape_outputs = batched_shape_outputs(spec)

    def __call__(self, session: Session | RequestSession, batch: list[Ticket]) -> Sequence[Ticket]:
        if session.takes_requests:
            self._execute_requests(session, batch)
        elif finished := self._run_batch(session, batch):
            # Counted here, because their sequences continue then.
            self._scheduler.release(finished)
        return ()

    def _compute(self, session: Session, batch: list[Ticket]) -> tuple[list[tuple[Tensor, ...]], int, int]:
        assert isinstance(batch, SequenceBatch)
        plan, states, entries, row_count = self._plan, self._states, batch.entries, batch.row_count
        requests = [ticket.request for ticket in batch]
        states.begin(entries)
        inputs = plan.gather(requests)
        if len(batch) < row_count:
            inputs = self._spread(inputs, entries, row_count)
        inputs.update((name, tensor.array) for name, tensor in self._controls.tensors(entries, row_count).items())
        inputs.update(states.gather(entries, row_count))
        input_end_ns = time.monotonic_ns()
        output_names = plan.output_names(requests)
        outputs = session.run(inputs, [*output_names, *(name for name in states.outputs if name not in output_names)])
        infer_end_ns = time.monotonic_ns()
        states.checked(outputs, row_count)
        declared_outputs = {name: array for name, array in outputs.items() if name not in states.undeclared}
        if len(batch) < row_count:
            declared_outputs = self._select_rows(declared_outputs, entries, row_count)
        outputs_by_request = plan.scatter(declared_outputs, requests, [ticket.item_count for ticket in batch])
        states.store(outputs, entries)
        return outputs_by_request, input_end_ns, infer_end_ns

    def _spread(
        self, inputs: Mapping[str, Array], entries: Sequence[SequenceEntry[Ticket]], row_count: int
    ) -> dict[str, Array]:
        """Return the inputs, with each request in the row of its sequence's slot, and zeros elsewhere."""
        rows = [entry.row for entry in entries]
        spread_inputs: dict[str, Array] = {}
        for name, array in inputs.items():
            if name in self._shape_inputs:
                spread_inputs[name] = replace_batch_size(array, len(entries), row_count)
                continue
            spread_inputs[name] = np.zeros((row_count, *array.shape[1:]), array.dtype)
            if array.dtype == DType.BYTES.numpy:
                spread_inputs[name][:] = b""
            spread_inputs[name][rows] = array
        return spread_inputs

    def _select_rows(
        self, outputs: Mapping[str, Array], entries: Sequence[SequenceEntry[Ticket]], row_count: int
    ) -> dict[str, Array]:
        rows = [entry.row for entry in entries]
        selected: dict[str, Array] = {}
        for name, array in outputs.items():
            if name in self._shape_outputs:
                selected[name] = replace_batch_size(array, row_count, len(entries))
            elif array.shape[:1] != (row_count,):
                raise BackendError(
                    f"model '{self._spec.name}' answered output '{name}' with shape {list(array.shape)} to a batch of "
                    f"{row_count} rows"
                )
            else:
                selected[name] = array[rows]
        return selected

    def _execute_requests(self, session: RequestSession, batch: list[Ticket]) -> None:
        assert isinstance(batch, SequenceBatch)
        if self._states:
            message = f"model '{self._spec.name}': its runtime keeps states itself and takes none from the server"
            self._fail(batch, BackendError(message), time.monotonic_ns())
            self._scheduler.release(batch)
            return
        super()._execute_requests(session, batch)

    def _session_inputs(self, batch: list[Ticket], executions: list[LiveExecution]) -> Sequence[Execution]:
        """Return the executions with the controls among their inputs, in the order of the rows. If the model takes
        READY, unused rows have an execution too."""
        assert isinstance(batch, SequenceBatch)
        tensors = self._controls.tensors(batch.entries, batch.row_count)
        for execution, entry in zip(executions, batch.entries, strict=True):
            inputs = {**execution.request.inputs, **self._row_of(tensors, entry.row)}
            execution.request = dataclasses.replace(execution.request, inputs=inputs, sequence=step_of(entry))
        if not self._controls.has_ready or len(executions) == batch.row_count:
            return executions
        first = executions[0].request
        used = {entry.row: execution for entry, execution in zip(batch.entries, executions, strict=True)}
        return [used.get(row) or IdleRow(first, self._row_of(tensors, row)) for row in range(batch.row_count)]

    def _row_of(self, tensors: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
        return {name: Tensor(name, tensor.dtype, tensor.array[row : row + 1]) for name, tensor in tensors.items()}


class IdleRow:
    """Execution for a row that no sequence uses now. Its responses are dropped."""

    def __init__(self, like: Request, controls: Mapping[str, Tensor]) -> None:
        inputs = {
            name: Tensor(name, tensor.dtype, blank(tensor.dtype, tensor.array.shape))
            for name, tensor in like.inputs.items()
        }
        self.request = Request(like.model, {**inputs, **controls}, like.version)

    def is_cancelled(self) -> bool:
        return False

    def send(
        self,
        outputs: Mapping[str, Array],
        *,
        is_final: bool = False,
        parameters: Mapping[str, Parameter] = NO_PARAMETERS,
    ) -> None:
        pass

    def fail(self, error: EdgeServerError, *, is_final: bool = True) -> None:
        pass

    def finish(self) -> None:
        pass

    def reschedule(self) -> None:
        pass
