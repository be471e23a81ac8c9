"""Files of exporters beside a model: found, bounded, never outside the model's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_server.backends.base import MAX_METADATA_TEXT
from edge_server.core.model_spec import ModelFile
from edge_server.repository.model_config.metadata_files import read_metadata_files


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
