"""Backends of other packages, found by their entry points."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_server.backends
from edge_server.backends import backend_names, load_backend
from edge_server.backends.base import ModelFile, Session
from edge_server.errors import BackendMissing, LoadError

EXAMPLE = Path(__file__).parent / "third_party_example"


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the example where packages are installed, and forget it afterwards."""
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.setattr(edge_server.backends, "_made", {})
    for name in ("thermal_runtime", "thermal_runtime.serving"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("_installed")
def test_a_package_adds_a_backend_by_an_entry_point(tmp_path: Path, job: Callable[..., Any]) -> None:
    assert "thermal" in backend_names()
    backend = load_backend("thermal")
    assert load_backend("thermal") is backend
    path = tmp_path / "camera" / "1" / "curve.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"gain": 0.04, "offset": 0}')
    file = ModelFile(path, path.parent.parent, 1)
    signature = backend.inspect(file, {})
    assert signature is not None
    session = backend.open(job(file, inputs=signature.inputs, outputs=signature.outputs, backend="thermal"))
    assert isinstance(session, Session)
    found = session.run({"COUNTS": np.array([[7500]], "u2")}, ["CELSIUS"])["CELSIUS"]
    np.testing.assert_allclose(found, [[26.85]], rtol=1e-6)
    path.write_text("{}")
    with pytest.raises(LoadError, match="model 'camera'"):
        backend.inspect(file, {})


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (Path(__file__).parents[2] / "docs/plugins.md").read_text().partition("## A runtime for models")[2]
    classes, entry = re.findall(r"^```\w*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[:2]
    assert (EXAMPLE / "thermal_runtime/serving.py").read_text().endswith(classes)
    assert entry in (EXAMPLE / "pyproject.toml").read_text()


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", r"backend 'broken' of package thermal-runtime 1\.4 \(thermal_runtime\.no_such_module:Backend\) "
                   r"does not load: ModuleNotFoundError"),
        ("notone", r"backend 'notone' of package thermal-runtime 1\.4 .* does not load: AttributeError"),
    ],
)  # fmt: skip
def test_a_backend_that_does_not_load_is_reported_with_its_package(name: str, message: str) -> None:
    with pytest.raises(BackendMissing, match=message):
        load_backend(name)


@pytest.mark.usefixtures("_installed")
def test_the_name_of_a_built_in_backend_cannot_be_taken() -> None:
    assert type(load_backend("stub")).__module__ == "edge_server.backends.builtin_models"


@pytest.mark.usefixtures("_installed")
def test_two_packages_that_register_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "rival-2.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 2.0\n")
    (folder / "entry_points.txt").write_text("[edge_server.backends]\nthermal = rival:Backend\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendMissing, match=r"registered by several packages: rival 2\.0, thermal-runtime 1\.4"):
        load_backend("thermal")


def test_an_unknown_backend_is_refused_with_the_known_names() -> None:
    with pytest.raises(BackendMissing, match=r"no backend is called 'thermal'; there are .*openvino"):
        load_backend("thermal")
