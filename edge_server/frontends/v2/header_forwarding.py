"""Conversion of HTTP headers or gRPC metadata to string parameters of a request, as the operator's pattern selects
them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from edge_server.core.request_response import Parameter
from edge_server.errors import InvalidRequest
from edge_server.frontends.v2.parameters import RESERVED_PREFIX

_RESERVED = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)


def header_parameters(headers: Iterable[tuple[str, str]], pattern: re.Pattern[str] | None) -> dict[str, Parameter]:
    """Return the headers whose full name matches `pattern`, as parameters.

    Raises InvalidRequest for a reserved name and for a value that is not printable.
    """
    if pattern is None:
        return {}
    parameters: dict[str, Parameter] = {}
    for name, value in headers:
        if pattern.fullmatch(name) is None:
            continue
        if name.lower() in _RESERVED or name.lower().startswith(RESERVED_PREFIX):
            raise InvalidRequest(f"header '{name}' matches the forward pattern but its name is reserved for parameters")
        if not value.isprintable():
            raise InvalidRequest(f"value of header '{name}' must be printable UTF-8 to be passed on to a model")
        parameters[name] = value
    return parameters
