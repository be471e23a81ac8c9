"""Check of the key or bearer token in the metadata of RPCs that the operator has restricted (Triton's
`--grpc-restricted-protocol`)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from edge_server.config import RestrictedGroup
from edge_server.errors import Refusal
from edge_server.frontends.access_control import is_shared_key
from edge_server.frontends.auth_tokens import Tokens
from edge_server.frontends.grpc.call import Metadata

CATEGORY_OF: Mapping[str, str] = {
    "ServerLive": "health",
    "ServerReady": "health",
    "ModelReady": "health",
    "Check": "health",
    "Watch": "health",
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
"""Restriction category of each RPC of GRPCInferenceService and of grpc.health.v1."""

REFLECTION_CATEGORY = "reflection"

_METADATA_PREFIX = "triton-grpc-protocol-"

_CHANGING_RPCS = ("Load", "Unload", "Register", "Unregister", "TraceSetting", "LogSettings")
"""Name endings of RPCs that can change the server's state."""

_log = logging.getLogger(__name__)


class Restriction:
    """Restriction of one RPC: its calls need the metadata of a group, or a token. `rpc` is its name."""

    def __init__(self, rpc: str, category: str, group: RestrictedGroup | None, tokens: Tokens) -> None:
        self._rpc = rpc
        self._category = category
        self._group = group
        # Header names are in lower case in HTTP/2.
        self._key = "" if group is None else f"{_METADATA_PREFIX}{group.key}".lower()
        self._tokens = tokens
        self._changes_server = rpc.endswith(_CHANGING_RPCS)

    def check(self, metadata: Metadata) -> None:
        """Raise an error unless a call with this metadata is allowed.

        Raises Unauthenticated or Forbidden if the RPC accepts tokens, else Refusal: UNAVAILABLE, as in Triton.
        """
        if self._group is not None and is_shared_key(_values(metadata, self._key), self._group.value):
            return
        if self._tokens.requires_token(self._category):
            name = self._tokens.admit(_values(metadata, "authorization"), self._category)
            if self._changes_server:
                _log.info("'%s' requested: %s", name, self._rpc)
        elif self._group is not None:
            raise Refusal(f"This protocol is restricted, expecting header '{self._key}'", retry_after_s=None)


def find_restriction(rpc: str, category: str, groups: Iterable[RestrictedGroup], tokens: Tokens) -> Restriction | None:
    """Return the restriction of an RPC of a category, or None."""
    group = next((group for group in groups if category in group.categories), None)
    return Restriction(rpc, category, group, tokens) if group is not None or tokens.is_used else None


def find_restrictions(groups: Iterable[RestrictedGroup], tokens: Tokens) -> dict[str, Restriction]:
    """Return the restrictions of the restricted RPCs, by RPC name."""
    found = {rpc: find_restriction(rpc, category, groups, tokens) for rpc, category in CATEGORY_OF.items()}
    return {rpc: item for rpc, item in found.items() if item is not None}


def _values(metadata: Metadata, key: str) -> list[str | bytes]:
    return [value for name, value in metadata if name == key]
