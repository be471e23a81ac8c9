"""Files of a new model: which belong to it, what is refused, and how its folder comes into the repository."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_server.errors import AlreadyExists, EdgeServerError, InvalidRequest
from edge_server.plugins.add import new_model
from edge_server.plugins.add.new_model import (
    check_is_free,
    check_name,
    copy_files,
    find_source,
    find_sources,
    move_into_place,
    staging_folder,
)


def save_with_external_weights(path: Path, location: str) -> None:
    weights = numpy_helper.from_array(np.ones((1, 300), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"])],
        "scaled",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 300])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 300])],
        [weights],
    )
    model = helper.make_model(graph)
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], location)
    path.with_name("weights.bin").write_bytes(weights.raw_data)
    model.graph.initializer[0].ClearField("raw_data")
    path.write_bytes(model.SerializeToString())


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("given", "names", "expected"),
    [
        ("net.onnx", ["net.onnx", "net.txt"], ["1/model.onnx"]),
        ("Net.ONNX", ["Net.ONNX"], ["1/model.onnx"]),
        ("net.xml", ["net.xml", "net.bin"], ["1/model.bin", "1/model.xml"]),
        ("net_openvino_model", ["net_openvino_model/net.xml", "net_openvino_model/net.bin"],
         ["1/model.bin", "1/model.xml"]),
        ("net.onnx", ["net.onnx", "metadata.yaml", "other.yaml"], ["1/metadata.yaml", "1/model.onnx"]),
        ("hub/onnx/net.onnx", ["hub/onnx/net.onnx", "hub/config.json"], ["1/config.json", "1/model.onnx"]),
        ("joe.onnx", ["joe.onnx", "joe.onnx.json"], ["1/model.onnx", "1/model.onnx.json"]),
        ("kokoro", ["kokoro/v1.onnx", "kokoro/voices-v1.0.bin"], ["1/model.onnx", "1/voices-v1.0.bin"]),
        ("forest.ubj", ["forest.ubj"], ["1/xgboost.ubj"]),
        ("net.tflite", ["net.tflite"], ["1/model.tflite"]),
        ("net.engine", ["net.engine"], ["1/model.plan"]),
        ("saved", ["saved/saved_model.pb", "saved/variables/variables.index"],
         ["1/model.savedmodel/saved_model.pb", "1/model.savedmodel/variables/variables.index"]),
        ("seer", ["seer/seer-q4.gguf", "seer/mmproj-f16.gguf"], ["1/mmproj-f16.gguf", "1/model.gguf"]),
        ("embed", ["embed/openvino_tokenizer.xml", "embed/openvino_model.xml"],
         ["1/openvino_model.xml", "1/openvino_tokenizer.xml", "config.pbtxt"]),
    ],
)  # fmt: skip
def test_the_files_of_a_model_get_the_names_that_runtimes_expect(
    tmp_path: Path, given: str, names: list[str], expected: list[str]
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"x")
    assert files_of(copy_files(find_source(tmp_path / given), tmp_path / "made" / "m")) == expected


@pytest.mark.parametrize(
    ("given", "models", "texts"),
    [
        (["det.onnx", "rec.onnx", "keys.txt"], ["det", "rec"], ["keys.txt"]),
        (["ocr"], ["cls", "det", "rec"], ["keys.txt"]),
        (["PP-OCRv5_det", "PP-OCRv5_rec"], ["PP-OCRv5_det", "PP-OCRv5_rec"], []),
        (["hub/onnx"], ["hub"], []),
        (["forest.txt"], ["forest"], []),
    ],
)
def test_several_models_and_a_list_of_characters_are_named_at_once(
    tmp_path: Path, given: list[str], models: list[str], texts: list[str]
) -> None:
    for name in (
        "det.onnx", "rec.onnx", "keys.txt", "forest.txt", "ocr/det.onnx", "ocr/rec.onnx", "ocr/cls.onnx",
        "ocr/keys.txt", "PP-OCRv5_det/inference.onnx", "PP-OCRv5_rec/inference.onnx", "hub/onnx/model.onnx",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"x")
    found = find_sources([tmp_path / name for name in given])
    assert [files.name for files in found.files] == models
    assert [path.name for path in found.text_files] == texts


def test_more_models_than_belong_together_are_refused(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.onnx").write_bytes(b"x")
    with pytest.raises(InvalidRequest, match="expected one model, or a text detector and its recogniser, given 5"):
        find_sources([tmp_path])
    with pytest.raises(InvalidRequest, match=r"; add each by itself: `edge-server add .*/0\.onnx`"):
        find_sources([tmp_path])
    (tmp_path / "a.txt").touch()
    with pytest.raises(InvalidRequest, match="expected one model, or a text detector and its recogniser, given 0"):
        find_sources([tmp_path / "a.txt", tmp_path / "a.txt"])


def test_weights_beside_an_onnx_file_are_copied_under_their_name(tmp_path: Path) -> None:
    save_with_external_weights(tmp_path / "big.onnx", "weights.bin")
    folder = copy_files(find_source(tmp_path / "big.onnx"), tmp_path / "made" / "big")
    assert files_of(folder) == ["1/model.onnx", "1/weights.bin"]


@pytest.mark.parametrize(
    ("location", "reason"), [("../../etc/passwd", "external data"), ("gone.bin", "expected its weights 'gone.bin'")]
)
def test_weights_outside_the_folder_or_missing_are_refused(tmp_path: Path, location: str, reason: str) -> None:
    save_with_external_weights(tmp_path / "big.onnx", location)
    with pytest.raises(InvalidRequest, match=reason):
        find_source(tmp_path / "big.onnx")


@pytest.mark.parametrize(
    ("given", "names", "reason"),
    [
        ("gone.onnx", [], "does not exist"),
        (
            "photo.jpg",
            ["photo.jpg"],
            r"no runtime reads files that end in '.jpg'; expected one of .onnx.*; export others to ONNX",
        ),
        ("forest.pkl", ["forest.pkl"], r"expected one of .onnx.*\.tl of treelite.*; convert a pickle to ONNX"),
        ("net.xml", ["net.xml"], "expected its weights 'net.bin' beside it"),
        (
            "two",
            ["two/a.onnx", "two/b.onnx"],
            "one model, given 'a.onnx', 'b.onnx'; name the file itself: `edge-server add .*/two/a.onnx`",
        ),
        ("none", ["none/readme.md"], "expected a folder with one model, given 'readme.md'$"),
        ("model", ["model/1/model.onnx"], "is already the folder of a model: copy it .* by `cp -r .*/model model_repo"),
        (
            "repository",
            ["repository/net/1/model.onnx"],
            "is a model repository: serve it by `edge-server serve --model",
        ),
    ],
)
def test_what_is_no_model_is_refused_with_what_is_expected(
    tmp_path: Path, given: str, names: list[str], reason: str
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(InvalidRequest, match=reason):
        find_source(tmp_path / given)


def test_each_file_of_an_exporter_is_copied_once(tmp_path: Path) -> None:
    for name in ("net.onnx", "config.json"):
        (tmp_path / name).write_bytes(b"x" * 10)
    files = find_source(tmp_path / "net.onnx")
    assert [target for _, target in files.copies] == ["model.onnx", "config.json"]
    assert files.size_bytes == 20


def test_files_that_cannot_be_read_and_large_folders_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "openvino_tokenizer.xml").write_text("<net/>")
    (tmp_path / "openvino_model.xml").symlink_to("gone")
    with pytest.raises(InvalidRequest, match=r"openvino_model\.xml' cannot be read: it is a link to nothing"):
        find_source(tmp_path)
    monkeypatch.setattr(new_model, "_MAX_ENTRIES", 1)
    with pytest.raises(InvalidRequest, match=r"expected at most 1 files, given more"):
        find_source(tmp_path)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "..", ".hidden", "x" * 201, "50%"])
def test_names_that_no_model_can_have_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="choose another with --name"):
        check_name(name)


def test_a_model_is_never_replaced_also_if_it_appears_during_the_copy(tmp_path: Path) -> None:
    repository, source = tmp_path / "models", tmp_path / "net.onnx"
    source.write_bytes(b"new")
    with staging_folder(repository) as staging:
        folder = copy_files(find_source(source), staging / "net")
        check_is_free(repository, "net")
        (repository / "net/3").mkdir(parents=True)
        (repository / "net/3/model.onnx").write_bytes(b"old")
        with pytest.raises(AlreadyExists, match=r"has version 3: .* a new version goes to '.*/net/4'"):
            move_into_place(folder, repository)
    assert files_of(repository) == ["net/3/model.onnx"]


def test_staging_folders_of_killed_processes_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    with staging_folder(repository) as living:
        (repository / ".add-dead").mkdir()
        (repository / ".add-dead/model.onnx").write_bytes(b"x")
        with staging_folder(repository):
            assert living.is_dir()
            assert not (repository / ".add-dead").exists()
    assert list(repository.iterdir()) == []


def test_a_repository_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EdgeServerError, match="cannot be written: No such file"), staging_folder(tmp_path / "a/b"):
        pass
