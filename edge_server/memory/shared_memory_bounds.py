"""Check that the part of a shared-memory region that a request names lies inside the region, with Triton's error
messages."""

from __future__ import annotations

from edge_server.errors import InvalidRequest


def check_inside(name: str, region_bytes: int, offset: int, byte_size: int) -> None:
    """Raise InvalidRequest for a slice that is not inside the region `name` of `region_bytes`."""
    if not 0 <= offset < region_bytes:
        raise InvalidRequest(
            f"Invalid offset for shared memory region: '{name}': {offset}, the region has {region_bytes} bytes"
        )
    if byte_size < 0 or offset + byte_size > region_bytes:
        raise InvalidRequest(
            f"Invalid offset + byte size for shared memory region: '{name}': {offset} + {byte_size}, "
            f"the region has {region_bytes} bytes"
        )
