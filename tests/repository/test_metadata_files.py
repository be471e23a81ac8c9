"""Files of exporters beside a model and packed into it: found, bounded, never outside the model's folder."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from edge_server.backends.base import MAX_METADATA_TEXT
from edge_server.core.model_spec import ModelFile
from edge_server.repository.metadata_files import MAX_PACKED_FILES, read_metadata_files


@pytest.fixture
def file(tmp_path: Path) -> ModelFile:
    path = tmp_path / "models/net/1/model.tflite"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"TFL3 network")
    return ModelFile(path, tmp_path / "models/net", 1)


def test_files_beside_the_model_go_before_those_of_its_folder(file: ModelFile) -> None:
    (file.model_dir / "config.json").write_text("folder")
    (file.model_dir / "infer_cfg.yml").write_text("folder")
    (file.version_dir / "config.json").write_text("version")
    (file.version_dir / "other.json").write_text("unknown")
    assert read_metadata_files(file) == {"config.json": "version", "infer_cfg.yml": "folder"}


def test_links_that_lead_out_large_files_and_other_bytes_are_omitted(file: ModelFile, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (file.version_dir / "config.json").symlink_to(tmp_path / "secret")
    (file.version_dir / "metadata.yaml").write_bytes(b"a" * (MAX_METADATA_TEXT + 1))
    (file.version_dir / "infer_cfg.yml").write_bytes(b"\xff\xfe")
    (file.version_dir / "preprocessor_config.json").mkdir()
    assert read_metadata_files(file) == {}


def test_texts_packed_into_a_tflite_file_are_found(file: ModelFile) -> None:
    with zipfile.ZipFile(file.path, "a") as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("labels.txt", "a\nb", zipfile.ZIP_DEFLATED)
        archive.writestr("bomb", b"a" * (MAX_METADATA_TEXT + 1), zipfile.ZIP_DEFLATED)
    assert read_metadata_files(file) == {"packed/metadata.json": "{}", "packed/labels.txt": "a\nb"}


def test_only_the_first_packed_files_are_read(file: ModelFile) -> None:
    with zipfile.ZipFile(file.path, "a") as archive:
        for index in range(MAX_PACKED_FILES + 5):
            archive.writestr(f"f{index}", "text")
    assert len(read_metadata_files(file)) == MAX_PACKED_FILES


def test_the_tensors_that_a_tflite_file_describes_are_found(file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_server.repository.tflite_metadata.read_tflite_metadata", lambda path: path.suffix)
    assert read_metadata_files(file) == {"tflite_metadata": ".tflite"}


@pytest.mark.parametrize("content", [b"PK\x05\x06", b"PK\x05\x06" + b"\xff" * 18, b"PK\x05\x06" + b"\0" * 18, b""])
def test_a_damaged_archive_gives_nothing(file: ModelFile, content: bytes) -> None:
    file.path.write_bytes(b"TFL3 network" + content)
    assert read_metadata_files(file) == {}


def test_a_large_directory_of_an_archive_is_not_read(file: ModelFile) -> None:
    with zipfile.ZipFile(file.path, "a") as archive:
        for index in range(1000):
            archive.writestr(f"file{index:060}", "")
    assert read_metadata_files(file) == {}
