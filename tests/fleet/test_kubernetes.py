"""The Kubernetes and KServe files of fleet/kubernetes, and their output of Kustomize and Helm: strict schemas, and
flags that the server knows."""

from __future__ import annotations

import copy
import gzip
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from edge_server.config import ConfigError
from edge_server.config.merge_settings import parse_serve
from edge_server.plugin import own_plugins

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "fleet/kubernetes"
CHART = FOLDER / "chart"
FILES = sorted(
    path for path in FOLDER.rglob("*.yaml") if path.name != "kustomization.yaml" and CHART not in path.parents
)
COMPONENTS = sorted(path.name for path in (FOLDER / "components").iterdir())
KUBERNETES = "1.35"
DEFAULT_GRACE_S = 30
"""Default terminationGracePeriodSeconds of a pod."""
CLOSING_S = 15
"""Time that the server may need to close after its drain."""
TYPES = {
    "ScaledObject": "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject",
    "GRPCRoute": "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1/GRPCRoute",
    "PodMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PodMonitor",
}
"""Kind -> npm package with its TypeScript type, for kinds that neither Kubernetes nor KServe define."""
has_schemas = all(importlib.util.find_spec(name) is not None for name in ("kubernetes_validate", "jsonschema"))


def fetched(name: str) -> str:
    """Return a program that fetch_kubernetes.sh brings."""
    folder = os.environ.get("EDGE_TEST_KUBERNETES", "")
    found = shutil.which(name, path=os.pathsep.join([folder, f"{folder}/node_modules/.bin", *os.get_exec_path()]))
    if found is None or not folder:
        pytest.skip(f"there is no {name}; tests/fleet/fetch_kubernetes.sh brings one")
    return found


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    return document


def containers(document: Any) -> Iterator[dict[str, Any]]:
    """Yield all containers inside a document."""
    if isinstance(document, dict):
        yield from document.get("containers", ())
        for value in document.values():
            yield from containers(value)


def check_types(documents: list[dict[str, Any]], folder: Path) -> str:
    """Return TypeScript's errors for documents of TYPES; it refuses members that the type does not have."""
    compiler = fetched("tsc")
    modules = folder / "node_modules"
    if not modules.exists():
        modules.symlink_to(Path(compiler).parents[1])
    for number, document in enumerate(documents):
        kind = document["kind"]
        (folder / f"d{number}.ts").write_text(
            f'import type {{I{kind}}} from "{TYPES[kind]}";\nexport const it: I{kind} = {json.dumps(document)};\n'
        )
    done = subprocess.run(
        [compiler, "--noEmit", "--strict", "--skipLibCheck", "--preserveSymlinks", "--module", "nodenext",
         "--moduleResolution", "nodenext", *(f"d{number}.ts" for number in range(len(documents)))],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.stdout


def check_schema(document: dict[str, Any]) -> None:
    """Raise if a document does not fit its schema, or has a member that the schema does not have."""
    import jsonschema
    import kubernetes_validate

    if "kserve" not in document["apiVersion"]:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    schemas = json.loads(gzip.decompress((ROOT / "tests/data/kserve/schemas.json.gz").read_bytes()))
    schema = closed(schemas[f"{document['apiVersion']} {document['kind']}"])
    # Without a check of the schema itself, and with the message alone: each takes ten seconds for these schemas.
    for error in jsonschema.validators.validator_for(schema)(schema).iter_errors(document):
        raise ValueError(error.message)


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
    def test_the_charts_flags_exist_in_the_server(self, path: Path) -> None:
        for container in containers(load(path)):
            config = parse_serve(container["args"], {}, own_plugins()).config
            grace_s = next(iter(find(load(path), "terminationGracePeriodSeconds")), DEFAULT_GRACE_S)
            assert config.lifecycle.drain_delay_s + config.lifecycle.exit_timeout_s + CLOSING_S < grace_s
            with pytest.raises(ConfigError, match="did you mean"):
                parse_serve([*container["args"], "--model-repositry=/x"], {}, own_plugins())

    def test_the_charts_ports_match_the_flags(self, path: Path) -> None:
        for container in containers(load(path)):
            config = parse_serve(container["args"], {}, own_plugins()).config
            stated = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
            http, grpc, metrics = config.http.port, config.grpc.port, config.metrics.port
            # KServe's names contain the protocol.
            expected = {"http": http, "http1": http, "grpc": grpc, "h2c": grpc, "metrics": metrics}
            assert stated.items() <= expected.items()

    @pytest.mark.full
    @pytest.mark.skipif(not has_schemas, reason="needs kubernetes-validate and jsonschema, of the extra test-all")
    def test_values_match_their_schema_and_a_misspelt_member_does_not(self, path: Path) -> None:
        document = load(path)
        if document["kind"] in TYPES:
            pytest.skip("test_resources_of_operators_match_their_schemas has them")
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
        assert sorted(load(path).get("resources", [])) == sorted(
            item.name for item in path.parent.glob("*.yaml") if item.name != "kustomization.yaml"
        )


def test_selectors_and_names_fit_together() -> None:
    deployment, service, headless, claim, budget, scaler = (
        load(FOLDER / "base" / f"{name}.yaml")
        for name in ("deployment", "service", "service-headless", "claim", "disruption-budget", "autoscaler")
    )
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    assert headless["spec"]["selector"] == labels
    assert headless["metadata"]["name"] != service["metadata"]["name"]
    pod = deployment["spec"]["template"]["spec"]
    assert [item["labelSelector"]["matchLabels"] for item in pod["topologySpreadConstraints"]] == [labels, labels]
    assert claim["metadata"]["name"] in list(find(pod, "claimName"))
    monitor = load(FOLDER / "components/pod-monitor/pod-monitor.yaml")["spec"]
    assert monitor["selector"]["matchLabels"] == labels
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in [port["name"] for port in pod["containers"][0]["ports"]]
    (rule,) = load(FOLDER.parent / "monitoring/prometheus-adapter.yml")["rules"]["custom"]
    assert [rule["name"]["as"]] == [item["pods"]["metric"]["name"] for item in scaler["spec"]["metrics"]]
    assert budget["spec"]["selector"]["matchLabels"] == labels
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert (
        load(FOLDER / "kserve/inference-service.yaml")["spec"]["predictor"]["model"]["runtime"]
        == (load(FOLDER / "kserve/runtime.yaml")["metadata"]["name"])
    )


def kustomized(folder: Path, *components: str) -> list[dict[str, Any]]:
    """Return the documents of the base with components, sorted by kind and name."""
    (folder / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "resources": ["fleet/base"],
                "components": [f"fleet/components/{name}" for name in components],
            }
        )
    )
    shutil.copytree(FOLDER, folder / "fleet", dirs_exist_ok=True)
    return in_order(run(fetched("kubectl"), "kustomize", folder))


def charted(*settings: str) -> list[dict[str, Any]]:
    """Return the documents of the chart, sorted by kind and name."""
    return in_order(run(fetched("helm"), "template", "edge-server", CHART, *(f"--set={text}" for text in settings)))


def in_order(text: str) -> list[dict[str, Any]]:
    documents = [document for document in yaml.safe_load_all(text) if document]
    return sorted(documents, key=lambda document: (document["kind"], document["metadata"]["name"]))


@pytest.mark.full
@pytest.mark.parametrize("name", ["base", "edge-daemonset", "kserve"])
def test_kubectl_renders_the_folder(name: str) -> None:
    rendered = in_order(run(fetched("kubectl"), "kustomize", FOLDER / name))
    assert len(rendered) == len(load(FOLDER / name / "kustomization.yaml")["resources"])


SETTINGS = {
    "grpc-route": ("gateway=gateway",),
    "image-volume": ("models.image=edge-server-models:latest",),
    "keda": ("autoscaler=keda",),
    "pod-monitor": ("podMonitor=true",),
}
"""Component -> the chart's settings that do the same."""


@pytest.mark.full
@pytest.mark.skipif(not has_schemas, reason="needs kubernetes-validate and jsonschema, of the extra test-all")
@pytest.mark.parametrize("components", [(), *((name,) for name in COMPONENTS), COMPONENTS], ids=str)
def test_chart_and_kustomize_base_render_the_same(components: tuple[str, ...], tmp_path: Path) -> None:
    made = charted(*itertools.chain.from_iterable(SETTINGS[name] for name in components))
    assert made == kustomized(tmp_path, *components)
    for document in made:
        if document["kind"] not in TYPES:
            check_schema(document)


@pytest.mark.full
def test_the_chart_takes_a_claim_arguments_and_a_fixed_number_of_pods() -> None:
    made = charted("autoscaler=none", "minReplicas=3", "models.claim=mine", "args[0]=--strict-readiness=false")
    by_kind = {document["kind"]: document for document in made}
    assert by_kind.keys() == {"Deployment", "PodDisruptionBudget", "Service"}
    deployment = by_kind["Deployment"]["spec"]
    assert deployment["replicas"] == 3
    assert list(find(deployment, "claimName")) == ["mine"]
    (container,) = deployment["template"]["spec"]["containers"]
    assert parse_serve(container["args"], {}, own_plugins()).config.repository.paths == ("/models",)
    assert container["args"][-1] == "--strict-readiness=false"


@pytest.mark.full
def test_the_chart_refuses_an_autoscaler_that_it_does_not_know() -> None:
    done = subprocess.run(
        [fetched("helm"), "template", "x", CHART, "--set=autoscaler=vpa"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "expected hpa, keda or none, got vpa" in done.stderr


@pytest.mark.full
def test_resources_of_operators_match_their_schemas(tmp_path: Path) -> None:
    documents = [document for document in map(load, FILES) if document["kind"] in TYPES]
    assert {document["kind"] for document in documents} == TYPES.keys()
    misspelt = copy.deepcopy(documents)
    for document in misspelt:
        document["spec"]["replica"] = 2
    said = check_types([*documents, *misspelt], tmp_path)
    for number in range(len(documents)):
        assert f"d{number}.ts" not in said, said
        assert f"d{number + len(documents)}.ts" in said, said
    assert said.count("'\"replica\"' does not exist") == len(documents)
