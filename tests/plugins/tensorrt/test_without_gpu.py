"""The plugin on a machine that builds no engines: it costs little, and still sets OpenVINO's cache folder."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edge_server.config.merge_settings import parse_serve
from edge_server.plugin import own_plugins
from edge_server.plugins.tensorrt.plugin import PLUGIN
from edge_server.plugins.tensorrt.settings import EngineConfig

PREPARED = """
import sys
from edge_server.config.merge_settings import parse_serve
from edge_server.plugin import own_plugins
from edge_server.plugins.tensorrt.plugin import PLUGIN
PLUGIN.prepare(parse_serve(["--model-repository=.", *sys.argv[1:]], {}, own_plugins()).config)
print(*(name for name in sys.modules if "tensorrt" in name))
"""


def test_only_the_routes_and_the_check_of_the_machine_are_imported() -> None:
    command = [sys.executable, "-c", PREPARED, "--engine-builder=false"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    plugin = "edge_server.plugins.tensorrt"
    entry = {plugin, f"{plugin}.plugin", f"{plugin}.settings"}
    used = {"running_plugin", "engine_source", "builds", "builds.http_routes"}
    assert set(loaded) == entry | {f"{plugin}.{name}" for name in used}


@pytest.mark.parametrize(
    ("flags", "engines", "openvino"),
    [
        ((), "/cache/engines", "/cache/openvino"),
        (("--engine-cache-dir=/disk/kept",), "/disk/kept", "/disk/openvino"),
        (("--engine-cache-dir=",), "/cache/engines", "/cache/openvino"),
    ],
)
def test_models_compiled_by_openvino_are_kept_beside_the_engines(
    flags: tuple[str, ...], engines: str, openvino: str
) -> None:
    arguments = ["--model-repository=.", "--engine-builder=false", *flags]
    config = parse_serve(arguments, {"CACHE_DIRECTORY": "/cache:/other"}, own_plugins()).config
    assert config.table(EngineConfig).cache_dir == engines
    running = PLUGIN.prepare(config)
    assert (running.onnx_backends, running.backend_settings) == ((), {"openvino": {"MODEL_CACHE_DIR": openvino}})
