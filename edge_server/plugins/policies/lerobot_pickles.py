"""Pickles of LeRobot's asynchronous inference: reads those of its clients within a written list of classes, and writes
actions.

LeRobot's wire (lerobot 0.4.4, async_inference/helpers.py) sends pickles, and reading a pickle can run any code of its
sender. So each instruction of a pickle is checked first. Then a reader makes only the classes of `_READABLE`: LeRobot's
messages, as plain objects of this module, and numpy's arrays and numbers, whose size is checked before memory is taken.
Nothing else can be named.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edge_server.errors import InvalidRequest
from edge_server.plugins.policies.array_messages import make_array, read_dtype

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_INSTRUCTIONS = 100_000

_ALLOWED = frozenset({
    "PROTO", "FRAME", "STOP", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "EMPTY_LIST",
    "EMPTY_DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "MARK", "APPEND", "APPENDS", "SETITEM",
    "SETITEMS", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "REDUCE",
    "NEWOBJ", "BUILD",
})  # fmt: skip
"""Instructions that pickle.dumps writes for such messages with protocols 3 to 5. Without those that load extensions or
persistent ids, and those that put numbers of any length or copies of the stack."""


class LeRobotMessage:
    """An object of one of LeRobot's classes, with its attributes."""


class ClientPolicy(LeRobotMessage):
    """RemotePolicyConfig: which policy a client wants, and what its robot observes."""

    pretrained_name_or_path: str
    lerobot_features: dict[str, Any]
    actions_per_chunk: int


class ClientObservation(LeRobotMessage):
    """TimedObservation: `timestamp` of the client's clock, `timestep` of its loop."""

    timestamp: float
    timestep: int
    observation: dict[str, Any]
    must_go: bool = False


class TimedRow(NamedTuple):
    """An action for one step of the client's loop."""

    timestamp: float
    timestep: int
    action: npt.NDArray[np.generic]


class _Feature(LeRobotMessage):
    pass


def _enumeration(value: object) -> object:
    return value


class _Array:
    """An array that is being read: `_reconstruct` makes it, its state follows."""

    value: npt.NDArray[np.generic]

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], _Type):
            raise InvalidRequest("expected an array of numbers as numpy pickles it")
        _, shape, dtype, is_fortran, data = state
        self.value = _make(data, dtype, shape, is_fortran is True)


class _Type:
    """A type of numbers that is being read: `dtype("f4", False, True)`, and a state with its byte order."""

    def __init__(self, name: object, *_: object) -> None:
        self._name = name
        self._order: object = "|"

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) > 1:
            self._order = state[1]

    def dtype(self) -> np.dtype[np.generic]:
        order = self._order if self._order in ("<", ">") else ""
        return read_dtype(f"{order}{self._name}" if isinstance(self._name, str) else self._name)


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _frombuffer(data: object, dtype: object, shape: object, order: object = "C", *_: object) -> _Array:
    if not isinstance(dtype, _Type):
        raise InvalidRequest("expected an array of numbers as numpy pickles it")
    found = _Array()
    found.value = _make(data, dtype, shape, order == "F")
    return found


def _scalar(dtype: object, data: object) -> object:
    if not isinstance(dtype, _Type) or not isinstance(data, bytes):
        raise InvalidRequest("expected a number as numpy pickles it")
    return _make(data, dtype, (), False).item()


def _make(data: object, dtype: _Type, shape: object, is_fortran: bool) -> npt.NDArray[np.generic]:
    data = bytes(data) if isinstance(data, bytearray) else data
    lengths = tuple(shape) if isinstance(shape, (tuple, list)) else (-1,)
    array = make_array(data, dtype.dtype(), lengths[::-1] if is_fortran else lengths)
    return array.transpose() if is_fortran else array


_HELPERS, _TYPES = "lerobot.async_inference.helpers", "lerobot.configs.types"
_READABLE: dict[tuple[str, str], Any] = {
    (_HELPERS, "RemotePolicyConfig"): ClientPolicy,
    (_HELPERS, "TimedObservation"): ClientObservation,
    (_TYPES, "PolicyFeature"): _Feature,
    (_TYPES, "FeatureType"): _enumeration,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    **{
        (f"numpy.{core}.{module}", name): value
        for core in ("core", "_core")
        for module, name, value in (
            ("multiarray", "_reconstruct", _reconstruct), ("multiarray", "scalar", _scalar),
            ("numeric", "_frombuffer", _frombuffer),
        )
    },
}  # fmt: skip


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _READABLE[module, name]
        except KeyError:
            raise InvalidRequest(f"the pickle names {module[:60]}.{name[:60]}, which is not read here") from None


def read_pickle(data: bytes) -> object:
    """Return the object of a client's pickle: for LeRobot's client a ClientPolicy or a ClientObservation, with plain
    values and arrays. Raises InvalidRequest."""
    try:
        for number, (operation, argument, _) in enumerate(pickletools.genops(data)):
            # A reader takes memory for all numbers of the memo below the largest one.
            is_far = operation.name == "LONG_BINPUT" and int(argument or 0) > MAX_INSTRUCTIONS
            if operation.name not in _ALLOWED or is_far or number >= MAX_INSTRUCTIONS:
                raise InvalidRequest(f"the pickle has the instruction {operation.name}, which is not read here")
        return _plain(_Reader(io.BytesIO(data)).load(), {})
    except InvalidRequest:
        raise
    except (
        pickle.UnpicklingError, ValueError, TypeError, AttributeError, IndexError, KeyError, EOFError, RecursionError,
        OverflowError, struct.error,
    ) as error:  # fmt: skip
        raise InvalidRequest(f"expected a pickle of LeRobot's client: {str(error)[:200]}") from None


def _plain(value: object, known: dict[int, Any]) -> Any:
    """Return the value with arrays in place of what reads them. `known`: the results for values that are shared."""
    if isinstance(value, _Array):
        if not hasattr(value, "value"):
            raise InvalidRequest("expected an array of numbers as numpy pickles it")
        return value.value
    if not isinstance(value, (dict, list, tuple, LeRobotMessage)):
        return value
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = None  # a value in itself
    found: Any = value
    if isinstance(value, dict):
        found = {key: _plain(item, known) for key, item in value.items() if isinstance(key, (str, int))}
    elif isinstance(value, LeRobotMessage):
        vars(value).update({name: _plain(item, known) for name, item in vars(value).items()})
    else:
        found = [_plain(item, known) for item in value]
    known[id(value)] = found
    return found


def write_actions(rows: Iterable[TimedRow]) -> bytes:
    """Return the pickle of a list of LeRobot's TimedAction, each with a tensor of torch, of float32."""
    out = io.BytesIO()
    out.write(pickle.PROTO + b"\x02" + pickle.EMPTY_LIST + pickle.MARK)
    for row in rows:
        out.write(pickle.GLOBAL + f"{_HELPERS}\nTimedAction\n".encode() + pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        out.write(pickle.EMPTY_DICT + pickle.MARK)
        out.write(_text("timestamp") + _float(row.timestamp))
        out.write(_text("timestep") + pickle.BININT + struct.pack("<i", row.timestep))
        values = b"".join(_float(value) for value in row.action.astype(np.float32).ravel().tolist())
        tensor = pickle.EMPTY_LIST + pickle.MARK + values + pickle.APPENDS + pickle.TUPLE1 + pickle.REDUCE
        out.write(_text("action") + pickle.GLOBAL + b"torch\ntensor\n" + tensor)
        out.write(pickle.SETITEMS + pickle.BUILD)
    out.write(pickle.APPENDS + pickle.STOP)
    return out.getvalue()


def _text(text: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(text)) + text.encode()


def _float(value: float) -> bytes:
    return pickle.BINFLOAT + struct.pack(">d", value)
