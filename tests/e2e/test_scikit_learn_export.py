"""The examples of docs/tables.md, and of docs/python-models.md about a joblib file: models of scikit-learn, XGBoost and
LightGBM."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.server import COMMAND, clean_environment, serve

DOCS = Path(__file__).parents[2] / "docs"
FORESTS = ("boosted", "light")


def blocks_of(page: str, title: str) -> list[str]:
    section = re.split("\n#+ ", (DOCS / page).read_text().partition(f"# {title}\n")[2])[0]
    return re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("skl2onnx", "sklearn")),
    reason="needs skl2onnx and scikit-learn, of the extra test-all",
)
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")
def test_the_classifier_of_the_page_is_exported_served_and_asked_as_written(tmp_path: Path) -> None:
    export, add_and_serve, request, request_in_python = blocks_of("tables.md", "A scikit-learn model")
    (add,) = re.findall("edge-server add .*", add_and_serve)

    run(tmp_path, sys.executable, "-c", export)
    run(tmp_path, "bash", "-c", add.replace("edge-server", str(COMMAND)))
    with serve(tmp_path / "model_repository") as server:
        answer = json.loads(run(tmp_path, "bash", "-c", request.replace("127.0.0.1:8000", server.http)))
        printed = run(tmp_path, sys.executable, "-c", request_in_python.replace("127.0.0.1:8000", server.http))
        table = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [150, 4], "data": [1.0] * 600}]}
        status, many = server.request("POST", "/v2/models/iris/infer", json.dumps(table).encode())
    outputs = {output["name"]: output for output in answer["outputs"]}
    assert outputs["label"]["data"] == [0, 2]
    assert outputs["probabilities"]["shape"] == [2, 3]
    assert printed.startswith("[[0]\n [2]] [[")
    assert status == 200, many


@pytest.mark.full
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("pandas", "skl2onnx", "sklearn")),
    reason="needs pandas, skl2onnx and scikit-learn, of the extra test-all",
)
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")
def test_the_pandas_pipeline_of_the_page_answers_a_row_and_a_dataframe_as_shown(tmp_path: Path) -> None:
    export, add_and_serve, request, shown, request_in_python = blocks_of("tables.md", "A pandas pipeline")
    run(tmp_path, sys.executable, "-c", export)
    (add,) = re.findall("edge-server add .*", add_and_serve)
    run(tmp_path, "bash", "-c", add.replace("edge-server", str(COMMAND)))
    with serve(tmp_path / "model_repository") as server:
        answer = json.loads(run(tmp_path, "bash", "-c", request.replace("127.0.0.1:8000", server.http)))
        printed = run(tmp_path, sys.executable, "-c", request_in_python.replace("127.0.0.1:8000", server.http))
    expected = json.loads(shown)
    assert answer.pop("probabilities") == pytest.approx(expected.pop("probabilities"), abs=1e-5)
    assert answer == expected
    assert [float(word) for word in printed.strip("[]\n").split()] == pytest.approx([0.69212, 0.16114], abs=1e-5)


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn, of the extra test-all")
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")
def test_the_joblib_file_of_the_page_serves_names_and_refuses_impossible_rows(tmp_path: Path) -> None:
    training, model, config, move, request = blocks_of("python-models.md", "A scikit-learn model from joblib")
    run(tmp_path, sys.executable, "-c", training)
    (tmp_path / "flowers/1/model.py").write_text(model)
    (tmp_path / "flowers/config.pbtxt").write_text(config)
    (tmp_path / "model_repository").mkdir()
    run(tmp_path, "bash", "-c", move.partition("edge-server")[0])
    with serve(tmp_path / "model_repository") as server:
        request = request.replace("127.0.0.1:8000", server.http)
        answer = json.loads(run(tmp_path, "bash", "-c", request))
        refusal = run(tmp_path, "bash", "-c", request.strip().replace("0.2", "-0.2") + " -w %{http_code}")
    assert answer["outputs"][0]["data"] == ["setosa", "virginica"]
    assert refusal == '{"error":"rows: expected lengths above 0 cm"}400'


@pytest.mark.full
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("pandas", "skl2onnx", "sklearn")),
    reason="needs pandas, skl2onnx and scikit-learn, of the extra test-all",
)
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")
@pytest.mark.parametrize(("is_decoded", "expected"), [(True, 0.69212), (False, 0.545)])
def test_the_pandas_pipeline_from_joblib_answers_right_only_if_its_texts_are_decoded(
    tmp_path: Path, is_decoded: bool, expected: float
) -> None:
    training = blocks_of("tables.md", "A pandas pipeline")[0]
    dump, model, config, request = blocks_of("python-models.md", "A pandas pipeline from joblib")
    (decoding,) = re.findall(".*decode.*\n", model)
    run(tmp_path, sys.executable, "-c", training + dump)
    (tmp_path / "shoppers/1/model.py").write_text(model if is_decoded else model.replace(decoding, ""))
    (tmp_path / "shoppers/config.pbtxt").write_text(config)
    (tmp_path / "model_repository").mkdir()
    move, request = re.findall("^(?:mv|curl) .*", request, re.MULTILINE)
    run(tmp_path, "bash", "-c", move)
    with serve(tmp_path / "model_repository") as server:
        answer = json.loads(run(tmp_path, "bash", "-c", request.replace("127.0.0.1:8000", server.http)))
    assert answer["probability"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.full
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("lightgbm", "sklearn", "treelite", "xgboost")),
    reason="needs LightGBM, scikit-learn, treelite and XGBoost, of the extra test-all",
)
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")
def test_the_forests_of_the_page_are_added_and_give_a_column_for_each_of_two_classes(tmp_path: Path) -> None:
    training, add_and_serve, request = blocks_of("tables.md", "An XGBoost or LightGBM model")
    run(tmp_path, sys.executable, "-c", training)
    for line in re.findall("edge-server add .*", add_and_serve):
        run(tmp_path, "bash", "-c", line.replace("edge-server", str(COMMAND)))
    with serve(tmp_path / "model_repository") as server:
        request = request.replace("127.0.0.1:8000", server.http)
        answers = [json.loads(run(tmp_path, "bash", "-c", request.replace("boosted", name))) for name in FORESTS]
    for answer in answers:
        (output,) = answer["outputs"]
        first, second = output["data"][:2], output["data"][2:]
        assert (output["name"], output["shape"]) == ("output__0", [2, 2])
        assert [sum(first), sum(second)] == pytest.approx([1, 1])
        assert [first[1] > 0.5, second[1] > 0.5] == [False, True]
