"""Policy of a robot: a model that declares parameters `policy_*`, with the conversion of observations to its inputs and
of its outputs to actions.

The fields of Policy declare the keys. An observation is a map, as robots send it: arrays, numbers and texts by name.
Maps inside it count as names with slashes: {"images": {"top": ...}} has the key "images/top". It has no batch
dimension.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from edge_server.config.model_parameters import NOT_STATED, ParameterReader, kind_of, settings_of, text_kind
from edge_server.config.setting import Kind, setting
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec, Recognised
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import BadModelConfig, InvalidRequest
from edge_server.plugins.vision.image_plan import ImagePlan, make_image_plans
from edge_server.plugins.vision.resize import Color
from edge_server.record import record

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_HORIZON = 10_000
_MAX_FRAMES = 100

MAX_DEPTH = 8


@record(frozen=True, slots=True)
class ObservationField:
    """An input, the key of its value in an observation, and how a picture becomes its value (None: it takes none)."""

    spec: InputSpec
    key: str
    images: ImagePlan | None


def _parse_action_key(given: str) -> str:
    if not 0 < len(given) <= 200:
        raise ValueError("expected 1 to 200 characters")
    return given


def _positive(largest: float, values: str, default: str, *, is_whole: bool = False) -> Kind:
    def parse(given: str) -> float:
        try:
            value = float(given)
        except ValueError:
            value = math.nan
        if not 0 < value <= largest or (is_whole and value != int(value)):
            raise ValueError(f"expected a {'whole ' if is_whole else ''}number above 0, at most {largest:g}")
        return int(value) if is_whole else value

    return kind_of(values, parse, default)


def _parse_frame_steps(given: str) -> tuple[int, ...]:
    try:
        steps = tuple(int(part) for part in given.split(",", _MAX_FRAMES))
    except ValueError:
        steps = ()
    if steps[-1:] != (0,) or steps[0] < -MAX_HORIZON or any(a >= b for a, b in itertools.pairwise(steps)):
        raise ValueError("expected whole numbers that rise to 0, as '-15, 0'")
    return steps


def _parse_metadata(given: str) -> Mapping[str, Any]:
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("expected a JSON object")
    return found


@record(frozen=True, slots=True)
class Policy:
    """Conversion plan of one version of a policy. Immutable and thread-safe.

    `horizon` None: as many actions as the model returns. `dt_ms` None: not stated. `max_age_ms` 0: any age.
    `previous_input` and `frozen_input`, "" for none, are the inputs of a policy that continues a chunk. They are zeros
    for an observation without their values. `frame_steps` are the time steps of an input's frames, 0 for the
    newest. They are for inputs with as many frames; all others have consecutive steps.
    """

    spec: ModelSpec
    output: OutputSpec
    action_key: str = setting(
        NOT_STATED, "policy_action_key", kind_of("key", _parse_action_key, "none: no policy"),
        "key of the actions in an answer, as actions")  # fmt: skip
    inputs: tuple[ObservationField, ...] = setting(
        NOT_STATED,
        "policy_inputs",
        text_kind("INPUT=KEY, ...", "the inputs' names"),
        "keys of the observation, by input",
    )
    horizon: int | None = setting(
        None, "policy_horizon", _positive(MAX_HORIZON, f"1 to {MAX_HORIZON}", "all", is_whole=True),
        "number of actions in an answer")  # fmt: skip
    dt_ms: float | None = setting(
        None, "policy_dt_ms", _positive(60_000, "milliseconds", "not stated"), "time between two actions"
    )
    max_age_ms: float = setting(
        0.0, "policy_max_age_ms", _positive(600_000, "milliseconds", "any age"),
        "age of an observation that ends its use")  # fmt: skip
    previous_input: str = setting(
        "", "policy_previous_input", text_kind("input", "none"),
        "gets the actions that are left of the chunk before, filled up with zeros")  # fmt: skip
    frozen_input: str = setting(
        "", "policy_frozen_input", text_kind("input", "none"), "gets how many of these are fixed: 0 without any"
    )
    frame_steps: tuple[int, ...] = setting(
        (), "policy_frame_steps", kind_of("-15, 0", _parse_frame_steps, "consecutive"),
        "time steps of an input's frames, 0 is the newest; for GR00T's clients")  # fmt: skip
    metadata: Mapping[str, Any] = setting(
        dict, "policy_metadata", kind_of("JSON object", _parse_metadata, "{}"), "what a client gets when it connects"
    )

    @property
    def takes_pictures(self) -> bool:
        """Whether reading an observation may take milliseconds."""
        return any(item.images is not None for item in self.inputs)

    def read(self, observation: Mapping[str, object]) -> dict[str, Tensor]:
        """Return the inputs for an observation. Values for no input are ignored. Raises InvalidRequest: model, key,
        expected, given."""
        tensors: dict[str, Tensor] = {}
        for item in self.inputs:
            name = item.spec.name
            value = _find(observation, item.key)
            if value is not _ABSENT:
                tensors[name] = self._tensor(
                    item, self._filled_up(item, value) if name == self.previous_input else value
                )
            elif name in (self.previous_input, self.frozen_input):
                zeros = np.zeros([max(length, 0) for length in item.spec.dims], item.spec.dtype.numpy)
                tensors[name] = Tensor(name, item.spec.dtype, self._shaped(item, zeros))
            elif not item.spec.is_optional:
                given = ", ".join(f"'{key}'" for key in itertools.islice(_names(observation), 20)) or "none"
                raise InvalidRequest(f"model '{self.spec.name}': the observation lacks '{item.key}'; given: {given}")
        return tensors

    def copied_bytes(self, observation: Mapping[str, object]) -> int:
        """Return the most bytes that `read` takes for copies of an observation's arrays. A picture in the model's size
        is not among them."""
        total = 0
        for item in self.inputs:
            value = _find(observation, item.key)
            if isinstance(value, np.ndarray):
                itemsize = value.itemsize if item.images is not None else item.spec.dtype.numpy.itemsize
                if item.spec.name == self.previous_input and value.ndim == 2:
                    total += max(len(value), item.spec.dims[-2]) * value.shape[1] * max(itemsize, value.itemsize)
                elif item.images is not None or value.dtype != item.spec.dtype.numpy:
                    total += value.size * itemsize
        return total

    def actions(self, outputs: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, npt.NDArray[np.generic]]:
        """Return the actions under their key, of shape (horizon, values of one action), and under their own names all
        other outputs with as many rows. Types are those of the model; FP16 and BF16 become float32."""
        own = {output.name: output for output in self.spec.outputs}
        rows = {name: self._rows(own[name], array) for name, array in outputs.items() if name in own}
        chunk = rows.pop(self.output.name)
        others = {name: array[: self.horizon] for name, array in rows.items() if array.shape[:1] == chunk.shape[:1]}
        return {**others, self.action_key: chunk[: self.horizon]}

    def _rows(self, spec: OutputSpec, array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        if spec.dtype is DType.BF16:
            array = (array.astype(np.uint32) << 16).view(np.float32)
        elif spec.dtype is DType.FP16:
            array = array.astype(np.float32)
        has_batch = self.spec.max_batch_size > 0 or (array.ndim == 3 and array.shape[0] == 1)
        return array[0] if has_batch else array

    def _tensor(self, item: ObservationField, value: object) -> Tensor:
        spec = item.spec
        if spec.dtype is DType.BYTES:
            return Tensor(spec.name, spec.dtype, self._shaped(item, self._texts(item, value)))
        array = self._numbers(item, value)
        if item.images is not None and array.dtype == np.uint8:
            return self._picture(item, item.images, array)
        if not np.can_cast(array.dtype, spec.dtype.numpy, "same_kind") or spec.dtype is DType.BF16:
            self._refuse(item, f"numbers that {spec.dtype.value} holds", array.dtype.name)
        return Tensor(spec.name, spec.dtype, self._shaped(item, array).astype(spec.dtype.numpy, copy=False))

    def _filled_up(self, item: ObservationField, value: object) -> npt.NDArray[np.generic]:
        """Return actions (rows, values) with as many rows as the input has."""
        array, rows = self._numbers(item, value), item.spec.dims[-2]
        if array.ndim != 2:
            self._refuse(item, "actions (rows, values)", list(array.shape))
        if rows < 0:
            return array
        return np.concatenate([array[:rows], np.zeros((max(0, rows - len(array)), array.shape[1]), array.dtype)])

    def _numbers(self, item: ObservationField, value: object) -> npt.NDArray[np.generic]:
        if isinstance(value, (np.ndarray, np.generic, bool, int, float, list, tuple)):
            try:
                array = np.asarray(value)
            except (ValueError, OverflowError):
                self._refuse(item, "numbers", "lists of several lengths")
            if array.dtype.kind not in "biuf":
                self._refuse(item, "an array of numbers", _describe(value))
            return array
        return self._refuse(item, "an array of numbers", _describe(value))

    def _texts(self, item: ObservationField, value: object) -> npt.NDArray[np.object_]:
        values = value if isinstance(value, (list, tuple)) else [value]
        while len(values) == 1 and isinstance(values[0], (list, tuple)):
            values = values[0]
        texts = np.empty(len(values), object)
        for at, text in enumerate(values):
            if not isinstance(text, (str, bytes)):
                self._refuse(item, "a text", _describe(value))
            texts[at] = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        return texts

    def _picture(self, item: ObservationField, plan: ImagePlan, array: npt.NDArray[np.generic]) -> Tensor:
        given = list(array.shape)
        while array.ndim > 3 and array.shape[0] == 1:
            array = array[0]
        if array.ndim == 3 and array.shape[2] not in (1, 3) and array.shape[0] in (1, 3):
            array = np.ascontiguousarray(array.transpose(1, 2, 0))
        if array.ndim == 3 and array.shape[2] == 1:
            array = array[:, :, 0]
        if not array.size or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3):
            self._refuse(item, "a picture (height, width, 3) or (3, height, width)", given)
        color = Color.GRAY if array.ndim == 2 else Color.RGB
        return plan.fit(array, color, model=self.spec.name)[0]

    def _shaped(self, item: ObservationField, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the array in the input's shape: leading ones are added or removed."""
        dims = item.spec.dims
        full = (1, *dims) if self.spec.max_batch_size > 0 else dims
        shape = ((1,) * (len(full) - array.ndim)) + array.shape
        while len(shape) > len(full) and shape[0] == 1:
            shape = shape[1:]
        if len(shape) == len(full) and all(want in (-1, have) for want, have in zip(full, shape, strict=True)):
            return array.reshape(shape)
        if item.images is not None:
            expected = f"a picture of bytes (uint8), or shape {list(dims)}"
            self._refuse(item, expected, f"{array.dtype.name} of shape {list(array.shape)}")
        return self._refuse(item, f"shape {list(dims)}", list(array.shape))

    def _refuse(self, item: ObservationField, expected: str, given: object) -> NoReturn:
        raise InvalidRequest(
            f"model '{self.spec.name}', '{item.key}' of the observation: expected {expected}, given {given}"
        )


def is_policy(spec: ModelSpec) -> bool:
    return "policy_action_key" in spec.all_parameters


def make_policy(spec: ModelSpec) -> Policy:
    """Return the plan of a policy. Raises BadModelConfig for wrong parameters."""
    reader = ParameterReader(spec.name, spec.all_parameters)
    reader.check_keys(("policy_",), settings_of(Policy))
    if spec.is_decoupled or (spec.sequence is not None and spec.sequence.is_iterative):
        kind = "decoupled" if spec.is_decoupled else "iterative"
        raise BadModelConfig(f"model '{spec.name}' is {kind}: a policy gives one answer to an observation")
    pictures = {plan.input_name: plan for plan in make_image_plans(spec)}
    values = reader.read(Policy)
    keys = _read_input_keys(reader, spec)
    values["inputs"] = tuple(
        ObservationField(item, keys.get(item.name, item.name), pictures.get(item.name)) for item in spec.inputs
    )
    output = spec.output(values["action_key"]) or spec.outputs[0]
    has_batch = spec.max_batch_size > 0
    if output.dims and len(output.dims) != 2 and (has_batch or len(output.dims) != 3):
        reader.refuse("policy_action_key", f"an output of shape (actions, values) as '{output.name}'", f"{output.dims}")
    rows = output.dims[1 if spec.max_batch_size == 0 and len(output.dims) == 3 else 0] if output.dims else 0
    horizon = values.setdefault("horizon", rows if rows > 0 else None)
    if horizon is not None and 0 < rows < horizon:
        reader.refuse("policy_horizon", f"at most the {rows} rows of output '{output.name}'")
    _check_input(reader, spec, "policy_previous_input", min_rank=2)
    _check_input(reader, spec, "policy_frozen_input", min_rank=0)
    steps = values.get("frame_steps")
    if steps and not any(len(steps) in item.dims[:-1] for item in spec.inputs):
        reader.refuse("policy_frame_steps", "as many steps as an input has frames in its dims")
    return Policy(spec, output, **values)


def _read_input_keys(reader: ParameterReader, spec: ModelSpec) -> Mapping[str, str]:
    """Return input -> key of the observation, as `policy_inputs` says."""
    found: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in reader.parameters.get("policy_inputs", "").split(","))):
        name, sign, key = (part.strip() for part in pair.partition("="))
        if not sign or not key or spec.input(name) is None or name in found:
            names = ", ".join(item.name for item in spec.inputs)
            reader.refuse("policy_inputs", f"INPUT=KEY, ..., each of the inputs ({names}) at most once", pair)
        found[name] = key
    return found


def _check_input(reader: ParameterReader, spec: ModelSpec, key: str, *, min_rank: int) -> None:
    name = reader.parameters.get(key)
    found = spec.input(name) if name else None
    if name and (found is None or len(found.dims) < min_rank or found.dtype is DType.BYTES):
        names = ", ".join(item.name for item in spec.inputs)
        shape = " of shape (actions, values)" if min_rank else ""
        reader.refuse(key, f"one of the inputs ({names}) with numbers{shape}")


def recognise_policy(spec: ModelSpec) -> Recognised | None:
    """Return the parameters of a policy whose inputs have the keys of LeRobot (observation.state,
    observation.images.NAME) or openpi (observation/state, observation/image) and whose output is the action or actions;
    else None. What the configuration states itself wins."""
    output = next((item for item in spec.outputs if item.name in ("action", "actions")), None)
    if output is None or "policy_action_key" in spec.parameters or spec.is_decoupled:
        return None
    dims = output.dims if spec.max_batch_size > 0 else output.dims[-2:]
    if len(dims) != 2 or not any(item.name.startswith(("observation.", "observation/")) for item in spec.inputs):
        return None
    parameters = {"policy_action_key": output.name}
    pictures = [item for item in spec.inputs if "image" in item.name and _is_picture(item, spec.max_batch_size > 0)]
    if pictures and not any(key.startswith("image_") for key in spec.parameters):
        parameters["image_input"] = ", ".join(item.name for item in pictures)
        if pictures[0].dtype is not DType.UINT8:
            parameters["image_scale"] = "1/255"
    size = " of ".join((f"{dims[0]} actions" if dims[0] > 0 else "actions", f"{dims[1]} values"))
    return Recognised(parameters, {}, f"recognised by its inputs and outputs: robot policy, {size}")


def _is_picture(item: InputSpec, has_batch: bool) -> bool:
    dims = item.dims if has_batch else item.dims[-3:]
    return len(dims) == 3 and 3 in (dims[0], dims[2]) and item.dtype in (DType.UINT8, DType.FP32, DType.FP16)


_ABSENT = object()


def _find(values: Mapping[Any, object], path: str) -> object:
    """Return the value at a path: a key, or keys of maps in maps with slashes between them. Without one, _ABSENT."""
    for key in (path, path.encode()):
        if not isinstance(found := values.get(key, _ABSENT), Mapping) and found is not _ABSENT:
            return found
    for at in (index for index, letter in enumerate(path) if letter == "/"):
        for key in (path[:at], path[:at].encode()):
            inner = values.get(key)
            if isinstance(inner, Mapping) and (found := _find(inner, path[at + 1 :])) is not _ABSENT:
                return found
    return _ABSENT


def _names(observation: Mapping[Any, object]) -> Iterator[str]:
    """Yield the paths of an observation's values, of long ones the beginning. Passes over maps in maps that are deeper
    than MAX_DEPTH."""
    waiting: list[tuple[str, Mapping[Any, object], int]] = [("", observation, 0)]
    while waiting:
        prefix, found, depth = waiting.pop()
        for key, value in found.items():
            name = f"{prefix}{key.decode(errors='replace') if isinstance(key, bytes) else key}"[:60]
            if not isinstance(value, Mapping):
                yield name
            elif depth < MAX_DEPTH:
                waiting.append((f"{name}/", value, depth + 1))


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype.name}"
    return f"'{value[:60]}'" if isinstance(value, str) else f"a value of type {type(value).__name__}"
