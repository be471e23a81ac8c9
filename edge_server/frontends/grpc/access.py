"""Restricted protocols: categories of RPCs that want a secret in the call's metadata (Triton's only access control)."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping

import grpc

from edge_server.config import RestrictedGroup
from edge_server.errors import Refusal

CATEGORY_OF: Mapping[str, str] = {
    "ServerLive": "health",
    "ServerReady": "health",
    "ModelReady": "health",
    "Check": "health",
    "ServerMetadata": "metadata",
    "ModelMetadata": "metadata",
    "ModelInfer": "inference",
    "ModelStreamInfer": "inference",
    "ModelConfig": "model-config",
    "ModelStatistics": "statistics",
    "RepositoryIndex": "model-repository",
    "RepositoryModelLoad": "model-repository",
    "RepositoryModelUnload": "model-repository",
    "SystemSharedMemoryStatus": "shared-memory",
    "SystemSharedMemoryRegister": "shared-memory",
    "SystemSharedMemoryUnregister": "shared-memory",
    "CudaSharedMemoryStatus": "shared-memory",
    "CudaSharedMemoryRegister": "shared-memory",
    "CudaSharedMemoryUnregister": "shared-memory",
    "TraceSetting": "trace",
    "LogSettings": "logging",
}
"""The category by which each RPC can be restricted. Reflection, which tells nothing but the schema, cannot be."""

_METADATA_PREFIX = "triton-grpc-protocol-"


class Restriction:
    """The metadata that a call must bring."""

    def __init__(self, group: RestrictedGroup) -> None:
        # HTTP/2 carries header names in lower case only.
        self._key = f"{_METADATA_PREFIX}{group.key}".lower()
        self._value = group.value.encode()

    def check(self, context: grpc.ServicerContext) -> None:
        """Raise Refusal (UNAVAILABLE, as Triton answers) unless the call brings the key with the right value."""
        given = [value for key, value in context.invocation_metadata() if key == self._key]
        if len(given) == 1 and hmac.compare_digest(_octets(given[0]), self._value):
            return
        raise Refusal(f"This protocol is restricted, expecting header '{self._key}'", retry_after_s=None)


def restriction(category: str, groups: Iterable[RestrictedGroup]) -> Restriction | None:
    """Return what restricts a category, None where anybody may call."""
    return next((Restriction(group) for group in groups if category in group.categories), None)


def _octets(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def restrictions(groups: Iterable[RestrictedGroup]) -> dict[str, Restriction]:
    """Return what restricts each RPC, by the RPC's name; RPCs that anybody may call are not in it."""
    by_category = {category: Restriction(group) for group in groups for category in group.categories}
    return {rpc: by_category[category] for rpc, category in CATEGORY_OF.items() if category in by_category}
