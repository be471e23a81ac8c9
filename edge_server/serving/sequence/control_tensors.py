"""Control and state inputs of a sequence model, which the server fills (START, END, READY, CORRID, state).

Arrays have `(rows, *shape)` when the model batches, else the shape itself; a control's shape is [1].
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TypeAlias

import numpy as np

from edge_server.backends.base import Array
from edge_server.core.ensemble_and_sequence_spec import ControlInput, ControlKind, SequenceBatching, StateTensor
from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import SequenceStep
from edge_server.core.sequence_batcher import SequenceEntry
from edge_server.core.tensor import DType, Tensor, fits, split_strings
from edge_server.errors import BackendError, BadModelConfig, InvalidRequest
from edge_server.serving.execution.ticket import Ticket

Entry: TypeAlias = SequenceEntry[Ticket]

INITIAL_STATE_DIR = "initial_state"
"""Folder of the model that holds the files of initial states, as Triton calls it."""


class Controls:
    """The control inputs of one model."""

    def __init__(self, spec: ModelSpec, batching: SequenceBatching) -> None:
        self._model = spec.name
        self._controls = batching.controls
        self._has_rows = spec.max_batch_size > 0
        self._ids = tuple(control for control in batching.controls if control.kind is ControlKind.CORRID)
        self.has_ready = any(control.kind is ControlKind.READY for control in batching.controls)

    def check_id(self, sequence_id: int | str) -> None:
        """Raise InvalidRequest for an id that an input of the model cannot take."""
        for control in self._ids:
            if control.dtype is DType.BYTES:
                continue
            if isinstance(sequence_id, str):
                raise self._bad_id(control, "an integer", f"the string '{sequence_id}'")
            limits = np.iinfo(control.dtype.numpy)  # type: ignore[type-var]
            if not limits.min <= sequence_id <= limits.max:
                raise self._bad_id(control, f"{limits.min} to {limits.max}", str(sequence_id))

    def tensors(self, entries: Sequence[Entry], row_count: int) -> dict[str, Tensor]:
        """Return the controls of a batch. Rows without an entry are not ready and belong to no sequence."""
        rows = [entry.row for entry in entries]
        tensors = {}
        for control in self._controls:
            false, true = (0, 1) if control.false_true is None else control.false_true
            array = blank(control.dtype, (row_count,), false)
            if control.kind is ControlKind.READY:
                array[rows] = true
            elif control.kind is ControlKind.CORRID:
                is_text = control.dtype is DType.BYTES
                for entry in entries:
                    array[entry.row] = str(entry.id).encode("utf-8", "surrogatepass") if is_text else entry.id
            else:
                is_start = control.kind is ControlKind.START
                array[[entry.row for entry in entries if (entry.is_start if is_start else entry.is_end)]] = true
            shaped = array.reshape((row_count, 1) if self._has_rows else (1,))
            tensors[control.name] = Tensor(control.name, control.dtype, shaped)
        return tensors

    def _bad_id(self, control: ControlInput, expected: str, given: str) -> InvalidRequest:
        return InvalidRequest(
            f"inference request to model '{self._model}': the correlation ID (sequence_id) goes into its "
            f"input '{control.name}' of type {control.dtype.value}: expected {expected}, given {given}"
        )


class StateTensors:
    """Initial states of the model, and the states of several sequences as a batch."""

    def __init__(self, spec: ModelSpec, batching: SequenceBatching) -> None:
        self._model = spec.name
        self._states = batching.states
        self._has_rows = spec.max_batch_size > 0
        self._shapes_vary = any(-1 in state.dims for state in batching.states)
        self._initial: Mapping[str, Array] = {}
        self.outputs = tuple(state.output_name for state in batching.states)
        self.undeclared = tuple(name for name in self.outputs if spec.output(name) is None)
        """Outputs that the model computes for the server alone."""

    def __bool__(self) -> bool:
        return bool(self._states)

    def load(self, model_dir: Path) -> None:
        """Read the initial states. Raises BadModelConfig for a file that is missing or has another size than stated."""
        self._initial = {
            state.input_name: _initial(self._model, state, model_dir, has_rows=self._has_rows) for state in self._states
        }

    def gather(self, entries: Sequence[Entry], row_count: int) -> dict[str, Array]:
        """Return the states of a batch: initial ones for a sequence that starts, zeros for unused rows."""
        batch: dict[str, Array] = {}
        for state in self._states:
            parts = [self._of(entry)[state.input_name] for entry in entries]
            if not self._has_rows:
                batch[state.input_name] = parts[0]
            elif len(parts) == row_count:
                batch[state.input_name] = parts[0] if row_count == 1 else np.concatenate(parts)
            else:
                joined = blank(state.dtype, (row_count, *parts[0].shape[1:]))
                joined[[entry.row for entry in entries]] = np.concatenate(parts)
                batch[state.input_name] = joined
        return batch

    def checked(self, outputs: Mapping[str, Array], row_count: int) -> None:
        """Raise BackendError for a state that is missing or differs from the configuration."""
        for state in self._states:
            array = outputs.get(state.output_name)
            expected = (row_count, *state.dims) if self._has_rows else state.dims
            if array is None:
                raise BackendError(f"model '{self._model}' did not answer its state output '{state.output_name}'")
            if array.dtype != state.dtype.numpy or not fits(array.shape, expected):
                raise BackendError(
                    f"model '{self._model}' answered its state output '{state.output_name}' with {array.dtype} "
                    f"{list(array.shape)}, but its configuration promises {state.dtype.value} {list(expected)}"
                )

    def store(self, outputs: Mapping[str, Array], entries: Sequence[Entry]) -> None:
        """Store the new state of each sequence after a batch without errors; copied, unless nothing else uses the
        array."""
        for entry in entries:
            sequence = entry.sequence
            if sequence is None:
                continue
            kept = {}
            for state in self._states:
                array = outputs[state.output_name]
                if self._has_rows and len(array) > 1:
                    array = array[entry.row : entry.row + 1].copy()
                elif state.output_name not in self.undeclared:
                    array = array.copy()
                kept[state.input_name] = array
            sequence.state = kept
            if self._shapes_vary:
                sequence.state_key = tuple(array.shape for array in kept.values())

    def begin(self, entries: Sequence[Entry]) -> None:
        """Forget the states of every sequence that starts: it begins anew even if the run fails."""
        for entry in entries:
            if entry.is_start and entry.sequence is not None:
                entry.sequence.state, entry.sequence.state_key = None, None

    def fresh(self, rows: int) -> dict[str, Tensor]:
        """Return the initial states for a batch of sequences that all begin."""
        return {
            state.input_name: Tensor(
                state.input_name,
                state.dtype,
                np.concatenate([self._initial[state.input_name]] * rows)
                if self._has_rows
                else self._initial[state.input_name],
            )
            for state in self._states
        }

    def _of(self, entry: Entry) -> Mapping[str, Array]:
        sequence = entry.sequence
        return self._initial if sequence is None or sequence.state is None else sequence.state


def initial_inputs(spec: ModelSpec, rows: int, model_dir: Path) -> dict[str, Tensor]:
    """Return the extra inputs of a generated request of `rows` rows: none for most models; for a model with sequences
    those that make each row a sequence of one request. Raises BadModelConfig."""
    batching = spec.sequence
    if batching is None:
        return {}
    states = StateTensors(spec, batching)
    states.load(model_dir)
    entries: list[Entry] = [
        SequenceEntry(1, None, 0, id=1 + row, is_start=True, is_end=True, row=row) for row in range(rows)
    ]
    return Controls(spec, batching).tensors(entries, rows) | states.fresh(rows)


def step_of(entry: Entry) -> SequenceStep:
    """Return the sequence step for the model. START may come from an earlier request that was cancelled."""
    return SequenceStep(entry.id, entry.is_start, entry.is_end)


def blank(dtype: DType, shape: tuple[int, ...], value: float = 0) -> Array:
    """Return an array of zeros, empty strings or one value."""
    if dtype is DType.BYTES:
        return np.full(shape, b"", dtype=object)
    return np.full(shape, value, dtype.numpy)


def _initial(model: str, state: StateTensor, model_dir: Path, *, has_rows: bool) -> Array:
    stated = state.initial
    # A dimension of any size is 1 until the model returns another one, as in Triton.
    dims = tuple(1 if dim == -1 else dim for dim in (state.dims if stated is None else stated.dims))
    shape = (1, *dims) if has_rows else dims
    if stated is None or not stated.file_name:
        return blank(state.dtype, shape)
    path = model_dir / INITIAL_STATE_DIR / stated.file_name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadModelConfig(
            f"model '{model}': initial_state of '{state.input_name}': cannot read {path}: {error.strerror}"
        ) from error
    prefix = f"model '{model}': initial_state of '{state.input_name}'"
    if state.dtype is DType.BYTES:
        return _strings(data, prod(dims), f"{prefix}, {path}").reshape(shape)
    need = prod(dims) * state.dtype.itemsize
    if len(data) != need:
        raise BadModelConfig(
            f"{prefix}: expected {need} bytes for {state.dtype.value} {list(dims)}, given {len(data)} in {path}"
        )
    return np.frombuffer(data, state.dtype.numpy).reshape(shape)


def _strings(data: bytes, count: int, prefix: str) -> Array:
    """Return strings in KServe's raw form: 4 bytes of length, little-endian, before each."""
    found: list[bytes] = []
    try:
        found += itertools.islice(split_strings(data), count + 1)
    except ValueError:
        raise BadModelConfig(
            f"{prefix}: expected the length of string {len(found)} in 4 bytes, little-endian, and the string, given a "
            f"file of {len(data)} bytes, which ends within them"
        ) from None
    if len(found) != count:
        given = f"more than {count}" if len(found) > count else str(len(found))
        raise BadModelConfig(f"{prefix}: expected {count} strings, each after its length in 4 bytes, given {given}")
    strings = np.empty(count, object)
    strings[:] = found
    return strings
