"""Warning about misspelt names in the `parameters` of a config.pbtxt, from the list of all names that the server reads.

A wrong name has no effect, and Triton's configurations may carry names that mean something to others. So only a name
near one that is read here earns a warning. Names in capitals are options of a runtime, which checks them itself. Python
models, C libraries and ensembles name parameters of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

OWN_NAMES = frozenset({"python", "c_abi", "ensemble"})
"""Backends whose models name parameters of their own."""

READ_NAMES = frozenset({
    "anomaly_output", "anomaly_score_output", "anomaly_threshold",
    "canary_max_error_rate", "canary_max_p99_ratio", "canary_min_requests", "canary_share", "chat_tokenizer",
    "class_activation", "class_output", "class_scale", "cpu_nthread", "creation_delay_sec", "crop_mode", "deepstack",
    "depth_kind", "depth_output", "depth_scale",
    "detection_activation", "detection_background", "detection_bins", "detection_box_format", "detection_box_unit",
    "detection_columns", "detection_keypoint_values", "detection_transposed", "image_constants",
    "detection_class_agnostic", "detection_head", "detection_iou_threshold", "detection_keypoints",
    "detection_mask_coefficients", "detection_max",
    "detection_outputs", "detection_score_threshold", "detection_strides", "detection_text_model",
    "detection_track_threshold", "detection_unclip_ratio", "detection_variances", "deterministic", "draft_model",
    "embedding_output", "enable_mem_arena", "enable_mem_pattern",
    "enable_padding", "enable_prefix_caching", "engine", "engine_tolerance", "execute_delay_ms", "execution_mode",
    "execution_thread", "gpu_layers", "idle_unload_s", "image_color", "image_crop_offset", "image_decode",
    "image_depth_unit", "image_fit", "image_hosts", "image_input", "image_interpolation",
    "image_mean", "image_pad_value", "image_resize", "image_scale",
    "image_stddev", "image_top_k", "initialize_timeout_s", "input_encoding", "input_image_height",
    "input_image_width", "instance_wise_delay_multiplier", "inter_op_thread_count", "intra_op_thread_count",
    "is_classifier", "isolation", "keep_aspect_ratio", "kv_cache_mb", "language_model_file", "languages",
    "length_scale", "lora_adapters",
    "mask_activation", "mask_layout", "mask_output", "mask_threshold", "mask_unseen", "matryoshka_dimensions",
    "max_audio_s",
    "max_context", "max_num_batched_tokens", "max_num_seqs", "max_queue_size", "max_text_characters",
    "max_waiting_per_sequence", "max_waiting_sequences",
    "memory.enable_memory_arena_shrinkage", "model_type", "network_image_height", "network_image_width", "niceness",
    "noise_scale", "noise_w", "normalize", "num_kv_blocks", "num_speculative_tokens", "num_threads",
    "optimization.graph.level", "output_class", "pooling", "precision",
    "policy_action_key", "policy_dt_ms", "policy_frame_steps", "policy_frozen_input", "policy_horizon", "policy_inputs",
    "policy_max_age_ms", "policy_metadata", "policy_previous_input",
    "predict_proba", "preprocessing", "priority_class", "prompt_lookup", "read_only_inputs",
    "reload_policy", "stub_delay_ms", "stub_fail", "stub_fail_after", "stub_fail_open", "stub_hang", "stub_leak_bytes",
    "stub_op", "stub_open_delay_ms", "threads",
    "threshold", "tool_call_parser", "track", "trt_builder_optimization_level", "trt_cuda_graph_enable",
    "trt_dla_core", "trt_dla_enable", "trt_extra_plugin_lib_paths", "trt_max_workspace_size",
    "trt_profile_max_shapes", "trt_profile_min_shapes", "trt_profile_opt_shapes", "vad", "variant", "voices",
    "warmup_allow_nan", "warmup_probe", "xgboost_allow_unknown_field", "xnnpack",
})  # fmt: skip

_NEAR = 0.8
"""Least similarity (difflib's ratio): a letter lost, added or exchanged in a name of five letters or more."""

_ENDINGS = ("ing", "er")
"""Endings that make a short name too unlike for `_NEAR`: tracking for track."""


def find_misspelt(backend: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return a warning for each name that no part of the server reads but that is near one that is read."""
    if backend in OWN_NAMES:
        return ()
    import difflib  # only where a name could be misspelt

    warnings = []
    for name in sorted(set(names) - READ_NAMES):
        if name.isupper():
            continue
        near = difflib.get_close_matches(name[:200], READ_NAMES, n=1, cutoff=_NEAR)
        near = near or [stem for ending in _ENDINGS if (stem := name[:200].removesuffix(ending)) in READ_NAMES]
        if near:
            warnings.append(f"parameter '{name[:80]}' has no effect: did you mean '{near[0]}'?")
    return tuple(warnings)
