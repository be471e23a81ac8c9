"""A backend of another package through the installed server."""

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
