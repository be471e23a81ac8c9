"""Forests and backends of other packages through the installed server."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.kit.model_folder import model_folder
from tests.kit.server import serve

pytestmark = pytest.mark.full

EXAMPLE = Path(__file__).parent.parent / "backends" / "third_party_example"


def test_a_third_party_package_serves_its_models(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "camera"
    model_folder(folder, 'backend: "thermal"\n', {"1/curve.json": '{"gain": 0.04, "offset": 0}'})
    paths = [str(EXAMPLE), os.environ.get("PYTHONPATH", "")]
    with serve(tmp_path / "models", environment={"PYTHONPATH": os.pathsep.join(filter(None, paths))}) as server:
        body = {"inputs": [{"name": "COUNTS", "datatype": "UINT16", "shape": [1, 2], "data": [7500, 7000]}]}
        status, answer = server.infer("camera", body)
        assert status == 200, answer
        np.testing.assert_allclose(answer["outputs"][0]["data"], [26.85, 6.85], rtol=1e-5)


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
    with serve(tmp_path / "models") as server:
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
