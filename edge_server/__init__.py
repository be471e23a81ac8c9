"""edge_server: a small inference server for robots and edge computers with the protocols of NVIDIA Triton.

Importing this package imports no runtime, web framework or gRPC: each is imported at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.version import __version__

if TYPE_CHECKING:
    from edge_server.process.embedded import InferOptions as InferOptions
    from edge_server.process.embedded import InferResult as InferResult
    from edge_server.process.embedded import RpcError as RpcError
    from edge_server.process.embedded import Server as Server

__all__ = ["InferOptions", "InferResult", "RpcError", "Server", "__version__"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    """Import the embeddable server at its first use."""
    if name not in __all__:
        raise AttributeError(f"module 'edge_server' has no attribute '{name}'")
    from edge_server.process import embedded

    return getattr(embedded, name)
