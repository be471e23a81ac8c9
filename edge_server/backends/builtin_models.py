"""Backend of models that need no file and no library: Triton's `identity`, `square` and `repeat`, and `stub`, which
delays and fails as its parameters say.

They need no file: a model is a config.pbtxt and an empty version folder. Parameters:

- `identity` (OUTPUTn = INPUTn): `execute_delay_ms`; `instance_wise_delay_multiplier` (instance i waits
  max(1, multiplier * i) times the delay); `creation_delay_sec`.
- `square` (decoupled; IN INT32 [1] -> IN times OUT = IN): `CUSTOM_INFER_DELAY_NS` before each response.
- `repeat` (decoupled; IN INT32 [-1], DELAY UINT32 [-1] ms, WAIT UINT32 [1] ms -> a pair OUT INT32 [1], IDX UINT32 [1]
  for each element of IN): response i is sent DELAY[i] after the previous one; the next request starts after WAIT.
- `stub`: `stub_op` is `double` (output i = 2 x input i, the default), `identity`, `sum` (each output is the sum of
  each row of its input, shape (rows, 1)) or `add_sub` (first output = first + second input, second = first - second);
  `stub_output` is `computed`, `zeros`, `nan`, `wrong_shape` (one row too many) or `missing` (no output at all);
  `stub_delay_ms` each run; `stub_open_delay_ms`; `stub_fail` true: each run fails; `stub_fail_after` N: runs after the
  N-th fail; `stub_fail_open`: opening fails with this text; `stub_hang` true: a run waits until the session is closed,
  then fails; `stub_leak_bytes`: memory that each run leaks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from edge_server.backends.base import Array, Backend, ModelFile, OpenJob, RequestSession, Session, SessionInfo
from edge_server.backends.builtin_decoupled_models import RepeatSession, SquareSession
from edge_server.backends.describe_model import precision_of_tensors
from edge_server.backends.option_parsers import whole_number, yes_or_no
from edge_server.backends.runtime_errors import message_line
from edge_server.core.model_spec import ModelSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, BackendMissing, BadModelConfig, LoadError

_SESSIONS = ("identity", "repeat", "square", "stub")
_OPERATIONS = ("double", "identity", "sum", "add_sub")
_OUTPUTS = ("computed", "zeros", "nan", "wrong_shape", "missing")


def make(name: str) -> StubBackend:
    return StubBackend(name)


class StubBackend(Backend):
    """Opens the built-in model of its name."""

    default_filename = ""

    def __init__(self, name: str) -> None:
        if name not in _SESSIONS:
            raise BackendMissing(f"no built-in model is called '{name}'; there are {', '.join(_SESSIONS)}")
        self.name = name

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> None:
        return None

    def open(self, job: OpenJob) -> Session | RequestSession:
        info = SessionInfo(
            f"built-in {self.name}",
            "CPU",
            precision_of_tensors(job.spec),
            dict(job.spec.parameters),
            is_bound=False,
            only_computes=not yes_or_no(job.spec.name, job.spec.parameters, "stub_hang", False),
        )
        if self.name == "identity":
            return IdentitySession(job, info)
        if self.name == "repeat":
            return RepeatSession(job.spec, info)
        if self.name == "square":
            return SquareSession(job.spec, info)
        return StubSession(job, info)


class IdentitySession(Session):
    """Copies INPUTn to OUTPUTn. An output whose optional input is missing is left out of the response."""

    def __init__(self, job: OpenJob, info: SessionInfo) -> None:
        model, parameters = job.spec.name, job.spec.parameters
        self.info = info
        self._sources = _input_of_output(job.spec)
        self._closed = threading.Event()
        delay_ms = whole_number(model, parameters, "execute_delay_ms", 0)
        multiplier = whole_number(model, parameters, "instance_wise_delay_multiplier", 0)
        self._delay_s = delay_ms * max(1, multiplier * _instance_index(job)) / 1000
        time.sleep(whole_number(model, parameters, "creation_delay_sec", 0))

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        if self._delay_s:
            self._closed.wait(self._delay_s)
        return {name: np.array(inputs[self._sources[name]]) for name in outputs if self._sources[name] in inputs}

    def close(self) -> None:
        self._closed.set()


def _input_of_output(spec: ModelSpec) -> dict[str, str]:
    """Return output name -> input name: by number for names INPUTn and OUTPUTn, else by order."""
    if len(spec.inputs) != len(spec.outputs):
        raise BadModelConfig(
            f"model '{spec.name}': model configuration must have equal input/output pairs, "
            f"got {len(spec.inputs)} inputs and {len(spec.outputs)} outputs"
        )
    sources = {output.name: given.name for given, output in zip(spec.inputs, spec.outputs, strict=True)}
    by_number = {output.name: "INPUT" + output.name.removeprefix("OUTPUT") for output in spec.outputs}
    if set(by_number.values()) == set(sources.values()):
        sources = by_number
    for output in spec.outputs:
        source = spec.input(sources[output.name])
        if source is not None and source.dtype is not output.dtype:
            raise BadModelConfig(
                f"model '{spec.name}': expected input and output datatype to match, got {source.name} "
                f"{source.dtype.config_name} and {output.name} {output.dtype.config_name}"
            )
    return sources


def _instance_index(job: OpenJob) -> int:
    """Return n of the instance's name `<group>_<n>` or `<group>_<n>_<gpu>`, 0 for other names."""
    for group in job.spec.instance_groups:
        number = job.instance_name.removeprefix(group.name + "_").partition("_")[0]
        if number != job.instance_name and number.isdecimal():
            return int(number)
    return 0


class StubSession(Session):
    """Computes a simple function, or fails as its parameters say, for tests."""

    def __init__(self, job: OpenJob, info: SessionInfo) -> None:
        spec, parameters = job.spec, job.spec.parameters
        self.info = info
        self._spec = spec
        self._closed = threading.Event()
        self._leaked: list[bytearray] = []
        self._runs = 0
        self._operation = _choice(spec, "stub_op", _OPERATIONS)
        self._output = _choice(spec, "stub_output", _OUTPUTS)
        self._delay_s = whole_number(spec.name, parameters, "stub_delay_ms", 0) / 1000
        self._leak_bytes = whole_number(spec.name, parameters, "stub_leak_bytes", 0)
        self._hangs = yes_or_no(spec.name, parameters, "stub_hang", False)
        self._fails_after = whole_number(spec.name, parameters, "stub_fail_after", -1)
        if yes_or_no(spec.name, parameters, "stub_fail", False):
            self._fails_after = 0
        if self._operation == "add_sub" and (len(spec.inputs), len(spec.outputs)) != (2, 2):
            raise BadModelConfig(f"model '{spec.name}': stub_op add_sub needs two inputs and two outputs")
        self._closed.wait(whole_number(spec.name, parameters, "stub_open_delay_ms", 0) / 1000)
        if "stub_fail_open" in parameters:
            raise LoadError(f"model '{spec.name}': {parameters['stub_fail_open']}")

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        if self._hangs:
            self._closed.wait()
            raise BackendError(f"model '{self._spec.name}': the session was closed while the run hung")
        if self._delay_s:
            self._closed.wait(self._delay_s)
        self._runs += 1
        if 0 <= self._fails_after < self._runs:
            raise BackendError(f"model '{self._spec.name}': run {self._runs} failed as told")
        if self._leak_bytes:
            self._leaked.append(bytearray(self._leak_bytes))
        if self._output == "missing":
            return {}
        try:
            return {name: self._corrupt(self._compute(name, inputs)) for name in outputs}
        except (ValueError, TypeError, IndexError) as error:
            said = message_line(error)
        raise BackendError(f"model '{self._spec.name}': cannot compute {self._operation}: {said}")

    def _compute(self, name: str, inputs: Mapping[str, Array]) -> Array:
        position = [output.name for output in self._spec.outputs].index(name)
        dtype = self._spec.outputs[position].dtype
        arrays = [inputs[given.name] for given in self._spec.inputs if given.name in inputs]
        array = arrays[min(position, len(arrays) - 1)]
        if self._operation == "add_sub":
            array = np.add(*arrays) if position == 0 else np.subtract(*arrays)
        elif self._operation == "sum":
            array = array.reshape(len(array), -1).sum(axis=1, keepdims=True)
        elif self._operation == "double" and dtype is not DType.BYTES:
            array = array * array.dtype.type(2)
        return np.array(array, dtype=dtype.numpy)

    def _corrupt(self, array: Array) -> Array:
        if self._output == "zeros":
            return np.zeros_like(array)
        if self._output == "nan":
            return np.full_like(array, np.nan if array.dtype.kind == "f" else 0)
        if self._output == "wrong_shape":
            return np.concatenate([array, array[:1]])
        return array

    def close(self) -> None:
        self._closed.set()
        self._leaked.clear()


def _choice(spec: ModelSpec, key: str, choices: tuple[str, ...]) -> str:
    chosen = spec.parameters.get(key, choices[0])
    if chosen not in choices:
        raise BadModelConfig(
            f"model '{spec.name}': parameter {key} must be one of {', '.join(choices)}, got '{chosen}'"
        )
    return chosen
