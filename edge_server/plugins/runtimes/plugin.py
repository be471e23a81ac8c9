"""Entry module of the plugin `runtimes`: declares the backends `pytorch`, `tensorflow`, `jax`, `litert`, `forest`,
`c_abi` and their other names."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from edge_server.plugin import ModelFormat, Plugin


class RuntimesPlugin(Plugin):
    name = "runtimes"
    backends = MappingProxyType(
        {
            "c_abi": "edge_server.plugins.runtimes.c_library.backend",
            "fil": "edge_server.plugins.runtimes.forest.backend",
            "forest": "edge_server.plugins.runtimes.forest.backend",
            "jax": "edge_server.plugins.runtimes.jax_export",
            "litert": "edge_server.plugins.runtimes.litert",
            "pytorch": "edge_server.plugins.runtimes.pytorch",
            "tensorflow": "edge_server.plugins.runtimes.tensorflow",
            "tflite": "edge_server.plugins.runtimes.litert",
        }
    )
    model_formats = (
        ModelFormat("model.pt", ("pytorch",), holds_code=True, platform="pytorch_libtorch"),
        ModelFormat("model.pt2", ("pytorch",), holds_code=True),
        ModelFormat("model.jaxexport", ("jax",), holds_code=True),
        ModelFormat("model.savedmodel", ("tensorflow",)),
        ModelFormat("libmodel.so", ("c_abi",), holds_code=True),
        ModelFormat("xgboost.json", ("forest",), writer="XGBoost"),
        ModelFormat("xgboost.ubj", ("forest",)),
        ModelFormat("xgboost.model", ("forest",), writer="XGBoost"),
        ModelFormat("checkpoint.tl", ("forest",)),
        ModelFormat("model.txt", ("forest",), writer="LightGBM"),
    )
    platforms = MappingProxyType(
        {
            "libtorch": "pytorch",
            "torch_aoti": "pytorch",
            "tensorflow_graphdef": "tensorflow",
            "tensorflow_savedmodel": "tensorflow",
        }
    )
    data_backends = ("fil", "forest", "litert", "tflite")

    def parameter_names(self) -> Iterable[str]:
        return (
            "cpu_nthread", "engine", "is_classifier", "model_type", "num_threads", "output_class", "predict_proba",
            "threshold", "xgboost_allow_unknown_field",
        )  # fmt: skip


PLUGIN = RuntimesPlugin()
