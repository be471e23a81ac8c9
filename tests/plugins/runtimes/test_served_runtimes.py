"""Exported JAX functions, SavedModels and C++ libraries, dropped into the repository of a server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

import edge_server.backends
from tests.kit.infer_input import infer_input
from tests.kit.server import serve_here

pytestmark = pytest.mark.full

HEADERS = Path(edge_server.backends.__file__).parent
SOURCE = Path(__file__).parent / "c_backend" / "moving_average.cpp"
SAVED_MODEL = Path(__file__).parents[2] / "data" / "linear.savedmodel"
PARAMETERS = """
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 50000 }
instance_group { count: 2 kind: KIND_CPU }
parameters { key: "window" value { string_value: "2" } }
parameters { key: "suffix" value { string_value: "+" } }
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def started(models: Path) -> Iterator[Callable[[], Any]]:
    """`started()` serves the models in the folder."""
    contexts = []

    def start() -> Any:
        contexts.append(serve_here(models))
        return contexts[-1].__enter__()

    yield start
    for context in contexts:
        context.__exit__(None, None, None)


def folder_of(models: Path, name: str) -> Path:
    folder = models / name / "1"
    folder.mkdir(parents=True)
    return folder


def ask(server: Any, model: str, **arrays: np.ndarray) -> Any:
    tensors = []
    for name, array in arrays.items():
        tensors.append(infer_input(triton, name, array, "BYTES" if array.dtype == object else "FP32"))
    with triton.InferenceServerClient(server.grpc) as client:
        return client.infer(model, tensors)


def test_a_cpp_library_serves_concurrent_clients_in_batches(models: Path, started: Callable[[], Any]) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to build the library with")
    folder = folder_of(models, "smooth")
    command = [compiler, "-shared", "-fPIC", "-O2", "-std=c++17", f"-I{HEADERS}", "-o", str(folder / "libmodel.so")]
    subprocess.run([*command, str(SOURCE)], check=True)
    (folder.parent / "config.pbtxt").write_text(PARAMETERS)
    server = started()

    def check(number: int) -> None:
        signal = np.array([[number, number + 2, number + 6]], np.float32)
        result = ask(server, "smooth", SIGNAL=signal, NAME=np.array([[f"s{number}".encode()]], dtype=object))
        assert result.as_numpy("SMOOTH").tolist() == [[number, number + 1, number + 4]]
        assert result.as_numpy("TAG").tolist() == [[f"s{number}+".encode()]]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(check, range(32)))
    statistics = server.statistics("smooth")
    assert statistics["inference_stats"]["success"]["count"] == 32
    assert max(int(item["batch_size"]) for item in statistics["batch_stats"]) > 1
    config = server.ask("/v2/models/smooth/config")[1]
    assert (config["backend"], config["default_model_filename"]) == ("c_abi", "libmodel.so")


def test_a_jax_function_is_served_by_its_argument_names(models: Path, started: Callable[[], Any]) -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed: pip install '.[jax]'")
    pytest.importorskip("jax.export")
    (rows,) = jax.export.symbolic_shape("rows")
    shape = jax.ShapeDtypeStruct((rows, 3), "float32")
    exported = jax.export.export(jax.jit(lambda a, b: {"dot": (a * b).sum(axis=1, keepdims=True)}))(a=shape, b=shape)
    (folder_of(models, "dot") / "model.jaxexport").write_bytes(exported.serialize())
    server = started()
    for count in (1, 4):
        a, b = np.arange(count * 3, dtype=np.float32).reshape(count, 3), np.full((count, 3), 2, np.float32)
        assert ask(server, "dot", a=a, b=b).as_numpy("dot").tolist() == (a * b).sum(axis=1, keepdims=True).tolist()
    with pytest.raises(InferenceServerException, match="unexpected shape"):
        ask(server, "dot", a=np.zeros((1, 4), np.float32), b=np.zeros((1, 4), np.float32))
    assert server.ask("/v2/models/dot/config")[1]["backend"] == "jax"


def test_a_saved_model_in_tritons_folder_layout_is_served(models: Path, started: Callable[[], Any]) -> None:
    pytest.importorskip("openvino")
    for name, config in (("plain", ""), ("stated", 'platform: "tensorflow_savedmodel"\nmax_batch_size: 4\n')):
        folder = folder_of(models, name)
        shutil.copytree(SAVED_MODEL, folder / "model.savedmodel")
        if config:
            (folder.parent / "config.pbtxt").write_text(config)
    server = started()
    for name in ("plain", "stated"):
        result = ask(server, name, features=np.array([[1, 1, 1], [0, 0, -1]], np.float32))
        np.testing.assert_allclose(result.as_numpy("scores"), [[9.5, 11.5], [-4.5, -6.5]], rtol=1e-6)
        assert result.as_numpy("best").tolist() == [[1], [0]]


def test_a_forest_without_a_configuration_returns_its_librarys_probabilities(tmp_path: Path) -> None:
    pytest.importorskip("treelite")
    xgboost = pytest.importorskip("xgboost")
    datasets = pytest.importorskip("sklearn.datasets")
    rows, classes = datasets.load_breast_cancer(return_X_y=True)
    model = xgboost.XGBClassifier(n_estimators=20, n_jobs=1).fit(rows, classes)
    for name, config in (
        ("plain", ""),
        ("fil", 'backend: "fil"\nmax_batch_size: 64\n'
                'input { name: "input__0" data_type: TYPE_FP32 dims: [30] }\n'
                'output { name: "output__0" data_type: TYPE_FP32 dims: [1] }\n'
                'instance_group { kind: KIND_AUTO }\n'
                'parameters { key: "model_type" value { string_value: "xgboost_json" } }\n'
                'parameters { key: "output_class" value { string_value: "true" } }\n'
                'parameters { key: "storage_type" value { string_value: "AUTO" } }\n'
                'dynamic_batching {}\n'),
    ):  # fmt: skip
        folder = tmp_path / "models" / name / "1"
        folder.mkdir(parents=True)
        model.save_model(folder / "xgboost.json")
        if config:
            (folder.parent / "config.pbtxt").write_text(config)
    with serve_here(tmp_path / "models") as server:
        given = rows[:5].astype("f4")
        body = {"inputs": [{"name": "input__0", "datatype": "FP32", "shape": [5, 30], "data": given.ravel().tolist()}]}
        status, answer = server.infer("plain", body)
        assert status == 200, answer
        found = np.reshape(answer["outputs"][0]["data"], answer["outputs"][0]["shape"])
        np.testing.assert_allclose(found, model.predict_proba(given), rtol=0, atol=2e-6)
        status, answer = server.infer("fil", body)
        assert status == 200, answer
        assert answer["outputs"][0]["shape"] == [5, 1]
        assert answer["outputs"][0]["data"] == model.predict(given).tolist()
        status, metadata = server.ask("/v2/models/plain")
        assert [item["shape"] for item in (*metadata["inputs"], *metadata["outputs"])] == [[-1, 30], [-1, 2]]
