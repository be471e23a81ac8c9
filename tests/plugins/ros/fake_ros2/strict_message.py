"""Messages as rosidl generates them for Python: fixed fields, and a setter that refuses other types."""

from __future__ import annotations

import array
from typing import Any

KINDS: dict[str, tuple[type, Any]] = {
    "string": (str, str),
    "float64": (float, float),
    "int32": (int, int),
    "uint32": (int, int),
    "uint8": (int, int),
    "bool": (bool, bool),
    "uint8[]": (array.array, lambda: array.array("B")),
}


def message(name: str, /, **fields: Any) -> type:
    """Make a class; a field's kind is a key of KINDS, another such class, or a list of one of them."""

    def build(self: Any, /, **given: Any) -> None:
        for field, kind in fields.items():
            setattr(self, field, given.pop(field, _default(kind)))
        assert not given, f"{name} has no {', '.join(given)}"

    def assign(self: Any, field: str, value: Any) -> None:
        if field not in fields:
            raise AttributeError(f"'{name}' object has no attribute '{field}'")
        assert _fits(fields[field], value), f"{name}.{field} cannot be {value!r}"
        object.__setattr__(self, field, value)

    return type(name, (), {"__init__": build, "__setattr__": assign, "FIELDS": fields})


def _default(kind: Any) -> Any:
    if isinstance(kind, str):
        return KINDS[kind][1]()
    return [] if isinstance(kind, list) else kind()


def _fits(kind: Any, value: Any) -> bool:
    if isinstance(kind, list):
        return isinstance(value, list) and all(isinstance(one, kind[0]) for one in value)
    return isinstance(value, KINDS[kind][0] if isinstance(kind, str) else kind)
