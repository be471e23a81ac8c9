"""List of the flags of Triton that the server accepts for compatibility, each with its warning or its setting here."""

from __future__ import annotations

from collections.abc import Mapping

_THREADS = "threads are managed by the front ends themselves"
_POOLS = "there are no memory pools"
_CLOUD = "there is no such front end"
_DIRECTORY = "there are no plug-in libraries to look for"

IGNORED: Mapping[str, str] = {
    "--http-thread-count": _THREADS,
    "--grpc-infer-thread-count": _THREADS,
    "--grpc-infer-allocation-pool-size": _POOLS,
    "--grpc-max-response-pool-size": _POOLS,
    "--buffer-manager-thread-count": _THREADS,
    "--pinned-memory-pool-byte-size": _POOLS,
    "--cuda-memory-pool-byte-size": _POOLS,
    "--cuda-virtual-address-size": _POOLS,
    "--enable-peer-access": "tensors are not copied between GPUs",
    "--min-supported-compute-capability": "each runtime decides which GPUs it supports",
    "--host-policy": "there are no host policies",
    "--model-namespacing": "model names are one namespace",
    "--backend-directory": _DIRECTORY,
    "--repoagent-directory": _DIRECTORY,
    "--cache-directory": _DIRECTORY,
    "--allow-sagemaker": _CLOUD,
    "--sagemaker-port": _CLOUD,
    "--sagemaker-safe-port-range": _CLOUD,
    "--sagemaker-thread-count": _CLOUD,
    "--allow-vertex-ai": _CLOUD,
    "--vertex-ai-default-model": _CLOUD,
    "--vertex-ai-port": _CLOUD,
    "--vertex-ai-thread-count": _CLOUD,
}
"""Triton's flags without effect -> the reason."""

TRACE_FLAGS: Mapping[str, str] = {
    "--trace-file": "triton,file",
    "--trace-level": "level",
    "--trace-rate": "rate",
    "--trace-count": "count",
    "--trace-log-frequency": "triton,log-frequency",
}
"""Triton's old flags of single trace settings -> their names in `--trace-config`."""

DEPRECATED: Mapping[str, str] = {
    "--response-cache-byte-size": "--cache-config=local,size=<bytes>",
    "--model-store": "--model-repository",
    "--strict-model-config": "--disable-auto-complete-config",
}
"""Triton's deprecated flags that still work -> the flag to use."""
