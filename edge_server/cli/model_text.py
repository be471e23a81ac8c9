"""Texts about models that several commands print. It imports nothing of the server, so that `status` starts fast."""

from __future__ import annotations

from edge_server.cli.console import clean
from edge_server.core.status_reports import TensorMetadata


def format_memory(byte_count: int) -> str:
    """Return a size in MB, "-" for 0: not measured."""
    return f"{byte_count / 1e6:.0f}" if byte_count else "-"


def reason_line(name: str, version: str, reason: str) -> str:
    """Return "model version 2: reason". A name and version at the beginning of the reason are not repeated."""
    title = f"{name} version {version}" if version else name
    text = reason.removeprefix(f"model '{name}': ").removeprefix(f"model '{name}' ")
    text = text.removeprefix(f"version {version}: ").removeprefix(f"version {version}, ")
    return clean(f"{title}: {text}")  # a reason may quote a damaged file


def describe_tensor(tensor: TensorMetadata) -> str:
    """Return "name FP32[-1,3,224,224]"."""
    return f"{tensor.name} {tensor.datatype}[{','.join(map(str, tensor.shape))}]"
