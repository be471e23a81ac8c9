"""Warning about misspelt names in the `parameters` of a config.pbtxt, from all names that the server reads.

A wrong name has no effect, and Triton's configurations may carry names that mean something to others. So only a name
near one that is read here earns a warning. Names in capitals are options of a runtime, which checks them itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from edge_server.own_plugins import plugin_objects

_CORE_NAMES = frozenset({
    "canary_max_error_rate", "canary_max_p99_ratio", "canary_min_requests", "canary_share", "creation_delay_sec",
    "enable_mem_arena", "enable_mem_pattern", "execute_delay_ms", "execution_mode", "idle_unload_s",
    "initialize_timeout_s", "instance_wise_delay_multiplier", "inter_op_thread_count", "intra_op_thread_count",
    "isolation", "max_waiting_per_sequence", "max_waiting_sequences", "memory.enable_memory_arena_shrinkage",
    "optimization.graph.level", "precision", "priority_class", "reload_policy", "stub_delay_ms", "stub_fail",
    "stub_fail_after", "stub_fail_open", "stub_hang", "stub_leak_bytes", "stub_op", "stub_open_delay_ms",
    "trt_cuda_graph_enable", "trt_max_workspace_size", "variant", "warmup_allow_nan", "warmup_probe", "xnnpack",
})  # fmt: skip
"""Names that the core and its backends read; plugins declare theirs (`Plugin.parameter_names`)."""

_NEAR = 0.8
"""Least similarity (difflib's ratio): a letter lost, added or exchanged in a name of five letters or more."""

_ENDINGS = ("ing", "er")
"""Endings that make a short name too unlike for `_NEAR`: tracking for track."""


@functools.cache
def read_names() -> frozenset[str]:
    """Return all names of parameters that the server reads. Imports the declarations of the plugins."""
    return _CORE_NAMES.union(*(plugin.parameter_names() for plugin in plugin_objects()))


def find_misspelt(names: Iterable[str]) -> tuple[str, ...]:
    """Return a warning for each name that no part of the server reads but that is near one that is read."""
    unknown = {name for name in names if not name.isupper()} - _CORE_NAMES
    for plugin in plugin_objects():
        if not unknown:  # the next declarations may import much
            return ()
        unknown -= set(plugin.parameter_names())
    import difflib  # only where a name could be misspelt

    warnings = []
    for name in sorted(unknown):
        near = difflib.get_close_matches(name[:200], read_names(), n=1, cutoff=_NEAR)
        near = near or [stem for ending in _ENDINGS if (stem := name[:200].removesuffix(ending)) in read_names()]
        if near:
            warnings.append(f"parameter '{name[:80]}' has no effect: did you mean '{near[0]}'?")
    return tuple(warnings)
