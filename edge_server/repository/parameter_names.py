"""Warning about misspelt names in the `parameters` of a config.pbtxt, from all names that the server reads.

A wrong name has no effect, and Triton's configurations may carry names that mean something to others. So only a name
near one that is read here earns a warning. Names in capitals are options of a runtime, which checks them itself. Python
models, C libraries and ensembles name parameters of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from edge_server.own_plugins import plugin_objects

OWN_NAMES = frozenset({"python", "c_abi", "ensemble"})
"""Backends whose models name parameters of their own."""

_OTHER_NAMES = frozenset({
    "canary_max_error_rate", "canary_max_p99_ratio", "canary_min_requests", "canary_share", "chat_tokenizer",
    "cpu_nthread", "creation_delay_sec", "deterministic", "draft_model", "embedding_output", "enable_mem_arena",
    "enable_mem_pattern", "enable_prefix_caching", "engine", "engine_tolerance", "execute_delay_ms", "execution_mode",
    "execution_thread", "gpu_layers", "idle_unload_s", "image_hosts", "initialize_timeout_s",
    "instance_wise_delay_multiplier", "inter_op_thread_count", "intra_op_thread_count", "is_classifier", "isolation",
    "kv_cache_mb", "language_model_file", "languages",
    "length_scale", "lora_adapters", "matryoshka_dimensions", "max_audio_s", "max_context",
    "max_num_batched_tokens", "max_num_seqs", "max_queue_size", "max_text_characters", "max_waiting_per_sequence",
    "max_waiting_sequences", "memory.enable_memory_arena_shrinkage", "model_type", "niceness", "noise_scale", "noise_w",
    "normalize", "num_kv_blocks", "num_speculative_tokens", "num_threads", "optimization.graph.level", "output_class",
    "pooling", "precision", "predict_proba", "priority_class", "prompt_lookup", "read_only_inputs", "reload_policy",
    "stub_delay_ms", "stub_fail", "stub_fail_after", "stub_fail_open", "stub_hang", "stub_leak_bytes", "stub_op",
    "stub_open_delay_ms", "threads", "threshold", "tool_call_parser", "trt_builder_optimization_level",
    "trt_cuda_graph_enable", "trt_dla_core", "trt_dla_enable", "trt_extra_plugin_lib_paths", "trt_max_workspace_size",
    "trt_profile_max_shapes", "trt_profile_min_shapes", "trt_profile_opt_shapes", "vad", "variant", "voices",
    "warmup_allow_nan", "warmup_probe", "xgboost_allow_unknown_field", "xnnpack",
})  # fmt: skip
"""Names of parameters that no plugin declares."""

_NEAR = 0.8
"""Least similarity (difflib's ratio): a letter lost, added or exchanged in a name of five letters or more."""

_ENDINGS = ("ing", "er")
"""Endings that make a short name too unlike for `_NEAR`: tracking for track."""


@functools.cache
def read_names() -> frozenset[str]:
    """Return all names of parameters that the server reads. Imports the declarations of the plugins."""
    return _OTHER_NAMES.union(*(plugin.parameter_names() for plugin in plugin_objects()))


def find_misspelt(backend: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return a warning for each name that no part of the server reads but that is near one that is read."""
    if backend in OWN_NAMES:
        return ()
    unknown = sorted(name for name in set(names) - _OTHER_NAMES if not name.isupper())
    if not unknown:
        return ()
    import difflib  # only where a name could be misspelt

    warnings = []
    known = read_names()
    for name in unknown:
        if name in known:
            continue
        near = difflib.get_close_matches(name[:200], known, n=1, cutoff=_NEAR)
        near = near or [stem for ending in _ENDINGS if (stem := name[:200].removesuffix(ending)) in known]
        if near:
            warnings.append(f"parameter '{name[:80]}' has no effect: did you mean '{near[0]}'?")
    return tuple(warnings)
