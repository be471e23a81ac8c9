"""Writes schemas.json.gz from a clone of github.com/kserve/kserve: `python make.py CLONE`.

It has the schemas of the CRDs that fleet/kubernetes/kserve uses, without their descriptions. LICENSE is KServe's.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import yaml

SOURCES = {"ClusterServingRuntime": "clusterservingruntimes", "InferenceService": "inferenceservices"}


def without_descriptions(value: Any) -> Any:
    if isinstance(value, list):
        return [without_descriptions(item) for item in value]
    if not isinstance(value, dict):
        return value
    # A property may be called "description" too; its value is a schema and no text.
    return {
        key: without_descriptions(item)
        for key, item in value.items()
        if not (key == "description" and isinstance(item, str))
    }


def main() -> None:
    schemas = {}
    for kind, name in SOURCES.items():
        text = (Path(sys.argv[1]) / f"config/crd/full/serving.kserve.io_{name}.yaml").read_text()
        (version,) = [item for item in yaml.safe_load(text)["spec"]["versions"] if item["served"]]
        schemas[f"serving.kserve.io/{version['name']} {kind}"] = without_descriptions(
            version["schema"]["openAPIV3Schema"]
        )
    data = json.dumps(schemas, sort_keys=True).encode()
    Path(__file__).with_name("schemas.json.gz").write_bytes(gzip.compress(data, 9, mtime=0))


if __name__ == "__main__":
    main()
