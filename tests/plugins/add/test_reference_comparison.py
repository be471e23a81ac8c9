"""`edge-server add --compare`: scores of a training program choose the preprocessing, or name the likeliest mistake."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_server.cli.main import main
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import InvalidRequest
from edge_server.plugins.add.picture_trial import PictureTrial, Reading
from edge_server.plugins.add.reference_comparison import ReferenceScores, ScoreComparison, read_reference

cv2 = pytest.importorskip("cv2")
image = pytest.importorskip("PIL.Image")
onnxruntime = pytest.importorskip("onnxruntime")

ROOT = Path(__file__).parents[3]
LITE = ROOT / "model_repository/efficientnet_lite0"
COFFEE = ROOT / "tests/data/coffee.jpg"
SIDE = 64
SPEC = ModelSpec(
    "net", "onnxruntime", "", 0, (InputSpec("x", DType.FP32, (1, 3, SIDE, SIDE)),),
    (OutputSpec("scores", DType.FP32, (1, 5)),), (),
)  # fmt: skip
LABELS = ("a", "b", "c", "d", "e")
MEAN, STDDEV = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def run(pixels: Any) -> Any:
    """Return the outputs of a network for pixels [3, side, side]: means of the channels and of two parts."""
    part = pixels[:, : SIDE // 4]
    return np.array([*pixels.mean(axis=(1, 2)), part.mean(), pixels[:, :, : SIDE // 4].mean()], np.float32)


def read_pixels(fit: str = "stretch") -> Any:
    """Return the picture as float32 [side, side, 3], red first, as a training program reads it."""
    pixels = cv2.imread(str(COFFEE))[..., ::-1]
    height, width = pixels.shape[:2]
    if fit == "stretch":
        return cv2.resize(pixels, (SIDE, SIDE), interpolation=cv2.INTER_AREA).astype(np.float32)
    factor = SIDE / max(height, width)
    small = cv2.resize(pixels, (round(width * factor), round(height * factor)), interpolation=cv2.INTER_AREA)
    whole = np.zeros((SIDE, SIDE, 3), np.float32)
    top, left = (SIDE - small.shape[0]) // 2, (SIDE - small.shape[1]) // 2
    whole[top : top + small.shape[0], left : left + small.shape[1]] = small
    return whole


def compare(scores: Any, labels: tuple[str, ...] = ()) -> tuple[ScoreComparison, Reading]:
    """Return the comparison with these scores, and the usual layout: rgb, stretched, pixels / 255."""
    picture = COFFEE.read_bytes()
    readings = PictureTrial(SPEC, {}, picture).readings
    usual = next(reading for reading in readings if reading.is_usual)
    usual = usual._replace(
        match=usual.match._replace(
            parameters={"class_output": "scores", "image_color": "rgb", "image_scale": "1/255", "image_fit": "stretch"}
        )
    )
    reference = ReferenceScores("s.json", {"": scores.astype(np.float64)}, labels)
    compared = ScoreComparison(SPEC, [usual, *readings], picture, reference)
    compared.evaluate([{"scores": run(sample["x"][0])[None]} for sample in compared.samples])
    return compared, usual


@pytest.mark.parametrize(
    ("pixels", "mistake"),
    [
        (read_pixels()[..., ::-1] / 255, "the order of the channels (image_color bgr instead of image_color rgb)"),
        (read_pixels(), "the scale of the values (image_scale 1 instead of image_scale 1/255)"),
        ((read_pixels() / 255 - MEAN) / STDDEV, "the scale of the values (image_scale 1/255, image_mean 0.485,"),
        (read_pixels() / 127.5 - 1, "the scale of the values (image_scale 1, image_mean 127.5"),
        (read_pixels("letterbox") / 255, "the fit of the picture (image_fit letterbox instead of image_fit stretch)"),
        (
            read_pixels("letterbox")[..., ::-1] / 255,
            "the order of the channels (image_color bgr instead of image_color rgb) and the fit of the picture",
        ),
    ],
)
def test_each_usual_mistake_is_named_by_the_parameters_that_give_the_references_numbers(
    pixels: Any, mistake: str
) -> None:
    compared, usual = compare(run(pixels.transpose(2, 0, 1)))
    ours = compared.attempt_of(usual)
    assert ours is not None
    assert f"the reference's numbers come with {mistake}" in compared.find_problem(ours, LABELS)
    chosen = compared.choose([], usual)
    ours = compared.attempt_of(chosen)
    assert ours is not None
    assert compared.find_problem(ours, LABELS) == ""
    assert chosen.match.parameters["class_output"] == "scores"
    stated = ", ".join(f"{key} {text}" for key, text in ours.parameters.items())
    assert chosen.match.evidence == f"with {stated} its outputs are those of s.json"
    assert "image_color" in stated


def test_equal_numbers_agree_and_shifted_labels_and_classes_are_named() -> None:
    right = run(read_pixels().transpose(2, 0, 1) / 255)
    compared, usual = compare(right, LABELS)
    ours = compared.attempt_of(usual)
    assert ours is not None
    assert compared.find_problem(ours, LABELS) == ""
    assert compared.rows(ours, LABELS)[0][0] == f"{right.argmax()} {LABELS[right.argmax()]}"
    shifted = ("background", *LABELS[:-1])
    problem = "the labels are shifted by one: class 0 is 'background' here and 'a' in the reference"
    assert problem in compared.find_problem(ours, shifted)
    assert "the labels are others: class 4 is 'f' here" in compared.find_problem(ours, (*LABELS[:-1], "f"))
    compared, usual = compare(np.roll(np.array([0.9, -0.3, 0.1, 0.5, 0.2], np.float32), 1))
    ours = compared.attempt_of(usual)
    assert ours is not None
    assert "usual preprocessings gives the reference's numbers" in compared.find_problem(ours, LABELS)
    compared, usual = compare(np.roll(right, 1))
    ours = compared.attempt_of(usual)
    assert ours is not None
    assert "classes are shifted by +1" in compared.find_problem(ours, LABELS)


def test_scores_of_a_detector_count_beside_boxes_that_are_much_greater() -> None:
    picture = COFFEE.read_bytes()
    readings = PictureTrial(SPEC, {}, picture).readings
    expected = np.concatenate([np.full((1, 4, 9), 300.0), np.full((1, 2, 9), 0.9)], axis=1)
    compared = ScoreComparison(SPEC, readings, picture, ReferenceScores("s.json", {"": expected.ravel()}, ()))
    given = expected.copy()
    given[0, 4, 3] = 0.6
    compared.evaluate([{"boxes": given} for _ in compared.samples])
    assert compared.attempts[0].difference == pytest.approx(0.3)
    assert not compared.attempts[0].fits
    titles = [title for title, _, _ in compared.rows(compared.attempts[0], [f"name {index}" for index in range(54)])]
    assert (titles[0], any("name" in title for title in titles)) == ("39", False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected"),
        ("[]", "expected"),
        ('{"scores": ["a"]}', "expected"),
        ('{"scores": [NaN]}', "all of them finite numbers"),
        ('{"scores": []}', "all of them finite numbers"),
    ],
)
def test_a_file_without_scores_is_refused_with_what_is_expected(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(InvalidRequest, match=message):
        read_reference(tmp_path / "s.json")


@pytest.fixture
def reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundled classifier without its configuration, and the scores of a program that knows its preprocessing."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(LITE / "1/model.onnx", tmp_path / "lite.onnx")
    picture = image.open(COFFEE).convert("RGB")
    factor = 256 / min(picture.size)
    picture = picture.resize([round(side * factor) for side in picture.size], image.BILINEAR)
    left, top = ((side - 224) // 2 for side in picture.size)
    pixels = (np.asarray(picture.crop((left, top, left + 224, top + 224)), np.float32) - 127) / 128
    session = onnxruntime.InferenceSession(str(LITE / "1/model.onnx"), providers=["CPUExecutionProvider"])
    scores = session.run(None, {"input": pixels.transpose(2, 0, 1)[None]})[0][0]
    labels = (LITE / "labels.txt").read_text().splitlines()
    (tmp_path / "scores.json").write_text(json.dumps({"scores": scores.tolist(), "labels": labels}))
    return tmp_path


@pytest.mark.full  # runs the classifier with up to 64 preprocessings: 20 s
@pytest.mark.usefixtures("tried_here")
def test_scores_choose_the_preprocessing_of_the_bundled_classifier_and_show_a_wrong_choice(
    reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--picture={COFFEE}", "--compare=scores.json", "--state-dir=state"]
    assert main(["add", "lite.onnx", *flags]) == 0
    said = capsys.readouterr().out
    assert "They agree: the largest difference is 0.0" in said
    assert [line.split()[1] for line in said.splitlines() if line.startswith("967 ")] == ["espresso"]
    config = (reference / "model_repository/lite/config.pbtxt").read_text()
    for key, text in (("image_fit", "crop"), ("image_resize", "256"), ("image_mean", "127.5"), ("image_color", "rgb")):
        assert f'\nparameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' in config
    assert main(["add", "lite.onnx", *flags, "--name=wrong", "--choose=1"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "the reference's numbers come with the scale of the values (image_scale 1, image_mean 127.5" in said
    assert "and the fit of the picture (image_fit crop, image_resize 256 instead of" in said
    assert main(["add", "lite.onnx", "--name=other", "--compare=scores.json"]) == 2
    assert "--compare needs --picture=FILE" in capsys.readouterr().err
    (reference / "scores.json").write_text('{"scores": [0.5, 0.5]}')
    assert main(["add", "lite.onnx", *flags, "--name=other"]) == 2
    assert "2 numbers are in scores.json, the model's outputs have 'probabilities' 1000" in capsys.readouterr().err
