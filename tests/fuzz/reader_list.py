"""The readers of foreign bytes that are fuzzed. Each has a module in `readers/` with `seeds` and `check`."""

from __future__ import annotations

READERS = {
    "http2": 512,
    "header_blocks": 512,
    "http1": 1024,
    "v2_json": 1024,
    "openai": 1024,
    "chat_apis": 1024,
    "answer_text": 256,
    "audio_form": 1024,
    "infer_message": 512,
    "frame_messages": 512,
    "detector_bodies": 512,
    "image_headers": 2048,
    "motion_jpeg": 1024,
    "onvif": 1024,
    "model_config": 1024,
    "model_size": 1024,
    "onnx_file": 1024,
    "export_metadata": 512,
    "wyoming_events": 1024,
    "robot_messages": 1024,
    "archive": 4096,
    "mcap": 2048,
}
"""Name -> most bytes of an input: most defects need few, and short inputs are quick."""

PACKAGES = ("edge_server", "hpack", "google", "tarfile", "zipfile")
"""Packages whose coverage guides the fuzzer: the server, and libraries that read for it."""
