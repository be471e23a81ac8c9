"""Parser of request parameters: checks those that the server understands, and passes the others to the model.

Both front ends pass Python values: str, int, float and bool. JSON also gives None, lists and dicts, which are refused.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from edge_server.core.request_response import Parameter, SequenceStep
from edge_server.errors import InvalidRequest
from edge_server.frontends.v2.requested_outputs import RequestedOutput
from edge_server.memory.region_pins import RegionRef
from edge_server.record import record

RESERVED_PREFIX = "triton_"

DEADLINE_KEY = "edge_deadline_ms"
"""Parameter of this server: milliseconds until the response is useless. Triton's `timeout` limits only the queueing."""

_MAX_DEADLINE_MS = 86_400_000

_UINT64_END = 2**64
_INT64_START, _INT64_END = -(2**63), 2**63
_MAX_SEQUENCE_ID_BYTES = 128


@record(slots=True)
class RequestParameters:
    """The parameters of a request, by purpose.

    `binary_output` applies to HTTP outputs that do not set `binary_data`. `custom` are the model's parameters and the
    allowed reserved ones. `deadline_ns` is a time.monotonic_ns value, 0 for none.
    """

    sequence: SequenceStep | None
    priority: int
    timeout_us: int
    binary_output: bool
    custom: dict[str, Parameter]
    deadline_ns: int = 0


def split_parameters(raw: Mapping[str, object], *, allow: Collection[str] = ()) -> RequestParameters:
    """Split the parameters of a request. Raises InvalidRequest for wrong types and for reserved keys not in `allow`."""
    if not raw:
        return RequestParameters(None, 0, 0, False, {})
    custom: dict[str, Parameter] = {}
    for key, value in raw.items():
        if key in _KNOWN:
            continue
        if key.startswith(RESERVED_PREFIX) and key not in allow:
            raise InvalidRequest(
                f"parameter keys starting with '{RESERVED_PREFIX}' are reserved for Triton usage and should not be "
                f"specified. Found: '{key}'"
            )
        custom[key] = custom_value(key, value)
    return RequestParameters(
        sequence=_sequence(raw),
        priority=_integer(raw, "priority", 0, _UINT64_END),
        timeout_us=_integer(raw, "timeout", 0, _UINT64_END),
        binary_output=_boolean(raw, "binary_data_output"),
        custom=custom,
        deadline_ns=_deadline(raw),
    )


_KNOWN = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output", DEADLINE_KEY)
)


def custom_value(key: str, value: object) -> Parameter:
    """Return a parameter for the model. Raises InvalidRequest for a value that gRPC or JSON cannot represent."""
    if isinstance(value, int) and not isinstance(value, bool) and not _INT64_START <= value < _INT64_END:
        raise InvalidRequest(f"value of parameter '{key}' does not fit into 64 bits")
    if isinstance(value, (str, int, float)):
        return value
    raise _wrong_type(key, "a string, an integer, a number or a boolean", value)


def region_reference(raw: Mapping[str, object], owner: str) -> RegionRef | None:
    """Return the shared-memory region named in the parameters of an input or output, or None.

    `owner` is "input 'x'" or "output 'x'", for messages. Raises InvalidRequest.
    """
    if "shared_memory_region" not in raw:
        for key in ("shared_memory_offset", "shared_memory_byte_size"):
            if key in raw:
                raise InvalidRequest(f"'{key}' of {owner} must not be given without 'shared_memory_region'")
        return None
    name = raw["shared_memory_region"]
    if not isinstance(name, str):
        raise _wrong_type("shared_memory_region", "a string", name)
    if "shared_memory_byte_size" not in raw:
        raise InvalidRequest(
            f"'shared_memory_byte_size' should be provided along with 'shared_memory_region' for {owner}"
        )
    return RegionRef(
        name,
        _integer(raw, "shared_memory_offset", 0, _INT64_END),
        _integer(raw, "shared_memory_byte_size", 0, _INT64_END),
    )


def requested_output(name: str, raw: Mapping[str, object]) -> RequestedOutput:
    """Return a requested output from its parameters; unknown ones are ignored, as in Triton. Raises InvalidRequest."""
    if not raw:
        return RequestedOutput(name)
    region = region_reference(raw, f"output '{name}'")
    classification = _integer(raw, "classification", 0, _INT64_END)
    if region is not None and classification > 0:
        raise InvalidRequest(f"output '{name}' can't set both 'shared_memory_region' and 'classification'")
    binary = _boolean(raw, "binary_data") if "binary_data" in raw else None
    return RequestedOutput(name, binary, classification, region)


def binary_data_size(raw: Mapping[str, object]) -> int | None:
    """Return the size of an input's raw data in the body, None if it has none. Raises InvalidRequest."""
    return _integer(raw, "binary_data_size", 0, _INT64_END) if "binary_data_size" in raw else None


def _sequence(raw: Mapping[str, object]) -> SequenceStep | None:
    is_start = _boolean(raw, "sequence_start")
    is_end = _boolean(raw, "sequence_end")
    value = raw.get("sequence_id", 0)
    if isinstance(value, str):
        if len(value.encode("utf-8", "surrogatepass")) > _MAX_SEQUENCE_ID_BYTES:
            raise InvalidRequest(f"string 'sequence_id' must not be longer than {_MAX_SEQUENCE_ID_BYTES} bytes")
        return SequenceStep(value, is_start, is_end) if value else None
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type("sequence_id", "an unsigned integer or a string", value)
    number = _integer(raw, "sequence_id", 0, _UINT64_END)
    return SequenceStep(number, is_start, is_end) if number else None


def _integer(raw: Mapping[str, object], key: str, start: int, end: int) -> int:
    value = raw.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type(key, "an unsigned integer", value)
    if not start <= value < end:
        raise InvalidRequest(f"value of parameter '{key}' is out of range, expected {start} to {end - 1}")
    return value


def _deadline(raw: Mapping[str, object]) -> int:
    if DEADLINE_KEY not in raw:
        return 0
    value = raw[DEADLINE_KEY]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_type(DEADLINE_KEY, "a number", value)
    if not 0 < value <= _MAX_DEADLINE_MS:
        raise InvalidRequest(
            f"value of parameter '{DEADLINE_KEY}' is out of range, expected more than 0 and at most {_MAX_DEADLINE_MS}"
        )
    return time.monotonic_ns() + int(value * 1e6)


def _boolean(raw: Mapping[str, object], key: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise _wrong_type(key, "a boolean", value)
    return value


def _wrong_type(key: str, expected: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"invalid value type for '{key}' parameter, expected {expected}, got {type(value).__name__}")
