"""The Kubernetes and KServe files of fleet/kubernetes: strict schemas, and flags that the server knows."""

from __future__ import annotations

import copy
import gzip
import importlib.util
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from edge_server.config import ConfigError
from edge_server.config.merge_settings import parse_serve

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "fleet/kubernetes"
FILES = sorted(path for path in FOLDER.rglob("*.yaml") if path.name != "kustomization.yaml")
KUBERNETES = "1.35"
has_schemas = all(importlib.util.find_spec(name) is not None for name in ("kubernetes_validate", "jsonschema"))


def load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    return document


def containers(document: Any) -> Iterator[dict[str, Any]]:
    """Yield all containers inside a document."""
    if isinstance(document, dict):
        yield from document.get("containers", ())
        for value in document.values():
            yield from containers(value)


def check_schema(document: dict[str, Any]) -> None:
    """Raise if a document does not fit its schema, or has a member that the schema does not have."""
    import jsonschema
    import kubernetes_validate

    if "kserve" not in document["apiVersion"]:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    schemas = json.loads(gzip.decompress((ROOT / "tests/data/kserve/schemas.json.gz").read_bytes()))
    schema = schemas[f"{document['apiVersion']} {document['kind']}"]
    jsonschema.validate(document, closed(schema))


def closed(schema: Any) -> Any:
    """Return a schema that refuses members which it does not name, as a strict API server does."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "x-kubernetes-preserve-unknown-fields" not in schema:
        found.setdefault("additionalProperties", False)
        if schema["properties"].get("metadata") == {"type": "object"}:
            found["properties"] = {**found["properties"], "metadata": {}}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
class TestEachFile:
    def test_its_flags_are_those_of_the_server(self, path: Path) -> None:
        for container in containers(load(path)):
            config = parse_serve(container["args"], {}).config
            grace_s = next(iter(find(load(path), "terminationGracePeriodSeconds")), 60)
            assert config.lifecycle.drain_delay_s + config.lifecycle.exit_timeout_s + 15 < grace_s
            with pytest.raises(ConfigError, match="did you mean"):
                parse_serve([*container["args"], "--model-repositry=/x"], {})

    def test_its_ports_are_those_of_the_flags(self, path: Path) -> None:
        for container in containers(load(path)):
            config = parse_serve(container["args"], {}).config
            stated = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
            expected = {"http": config.http.port, "grpc": config.grpc.port, "metrics": config.metrics.port}
            assert stated in ({}, expected)

    @pytest.mark.full
    @pytest.mark.skipif(not has_schemas, reason="needs kubernetes-validate and jsonschema, of the extra test-all")
    def test_it_fits_its_schema_and_a_misspelt_member_does_not(self, path: Path) -> None:
        document = load(path)
        check_schema(document)
        misspelt = copy.deepcopy(document)
        misspelt["spec"]["replica"] = 2
        with pytest.raises(Exception, match="replica"):
            check_schema(misspelt)


def find(document: Any, name: str) -> Iterator[Any]:
    """Yield the values of all members of that name."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key == name:
                yield value
            yield from find(value, name)
    elif isinstance(document, list):
        for item in document:
            yield from find(item, name)


def test_each_file_belongs_to_a_kustomization() -> None:
    for path in FOLDER.rglob("kustomization.yaml"):
        assert sorted(load(path)["resources"]) == sorted(
            item.name for item in path.parent.glob("*.yaml") if item.name != "kustomization.yaml"
        )


def test_selectors_and_names_fit_together() -> None:
    deployment, service, budget, scaler = (
        load(FOLDER / "base" / name)
        for name in ("deployment.yaml", "service.yaml", "disruption-budget.yaml", "autoscaler.yaml")
    )
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    assert budget["spec"]["selector"]["matchLabels"] == labels
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert (
        load(FOLDER / "kserve/inference-service.yaml")["spec"]["predictor"]["model"]["runtime"]
        == (load(FOLDER / "kserve/runtime.yaml")["metadata"]["name"])
    )


@pytest.mark.full
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("name", ["base", "edge-daemonset", "kserve"])
def test_kubectl_renders_the_folder(name: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", FOLDER / name], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(list(yaml.safe_load_all(done.stdout))) == len(load(FOLDER / name / "kustomization.yaml")["resources"])
