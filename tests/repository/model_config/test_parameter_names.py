"""Misspelt names of `parameters` in config.pbtxt."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import edge_server
from edge_server.backends import load_backend
from edge_server.core.model_spec import ModelSpec
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.model_config.parameter_names import find_misspelt, read_names
from edge_server.repository.resolve_version import ResolveOptions, resolve

PACKAGE = Path(edge_server.__file__).parent
READERS = ["backends", "serving", "repository", "core/priority_class.py"]
READERS += [f"plugins/{name}" for name in ("language", "python_models", "runtimes", "speech", "tensorrt", "vision")]
OTHER = {"parameters", "arguments", "string_value", "device", "openvino", "bf16", "fp32", "false", "true"}
OTHER |= {"none", "auto", "normal", "serve", "isolated", "max_tokens_per_doc", "text.format.schema"}
"""What the search for names finds besides names of parameters of models, and of a request."""
METHODS = "number|choice|names|integer|boolean|numbers"
"""Methods of readers of parameters."""


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("detecton_head", "detection_head"), ("isolaton", "isolation"), ("idle_unlod_s", "idle_unload_s"),
        ("precison", "precision"), ("canary_shares", "canary_share"), ("Track", "track"),
        ("tracking", "track"),
    ],
)  # fmt: skip
def test_a_name_near_one_that_is_read_is_named_with_it(given: str, near: str) -> None:
    assert find_misspelt([given]) == (f"parameter '{given}' has no effect: did you mean '{near}'?",)


@pytest.mark.parametrize("given", ["site", "max_workspace_size_bytes", "session.intra_op.allow_spinning", "NUM_STREAM"])
def test_names_of_others_are_no_mistakes(given: str) -> None:
    assert find_misspelt([given, *read_names()]) == ()


MODEL = b"class TritonPythonModel:\n    pass\n"
ENSEMBLE = """platform: "ensemble" input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ensemble_scheduling { step { model_name: "n" model_version: -1
input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }"""


@pytest.mark.parametrize("config", ['backend: "python"', ENSEMBLE])
def test_models_that_name_parameters_of_their_own_get_no_warning(
    root: Path, add_model: Callable[..., Any], config: str
) -> None:
    add_model(
        "m", f'{config} parameters {{ key: "isolaton" value {{ string_value: "9" }} }}', {"1/model.py": MODEL}, ()
    )
    model = Scanner([root]).find("m")
    assert model is not None
    assert resolve(model, 1, ResolveOptions()).spec.warnings == ()


@pytest.mark.parametrize("backend", ["python", "c_abi"])
def test_backends_of_programs_say_that_their_models_name_parameters(backend: str) -> None:
    assert load_backend(backend).names_parameters


def test_the_warning_is_part_of_the_specification(root: Path, add_model: Any, resolved_spec: Any) -> None:
    spec: ModelSpec = resolved_spec('parameters { key: "idle_unlod_s" value { string_value: "9" } }')
    assert spec.warnings == ("parameter 'idle_unlod_s' has no effect: did you mean 'idle_unload_s'?",)


@pytest.fixture
def resolved_spec(root: Path, add_model: Callable[..., Any]) -> Callable[[str], ModelSpec]:
    def call(more: str) -> ModelSpec:
        tensors = ('input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } '
                   'output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }')  # fmt: skip
        add_model("m", f'backend: "identity" {tensors} {more}')
        model = Scanner([root]).find("m")
        assert model is not None
        return resolve(model, 1, ResolveOptions()).spec

    return call


def names_read(path: Path) -> Iterator[str]:
    """Yield the texts that a file looks up in parameters: `parameters.get("x")`, `"x" in parameters`, `number("x")`."""
    source = path.read_text()
    if not re.search(rf"parameters|merged|\._?({METHODS})\b", source):
        return  # most files; to parse and to walk all of them takes seconds
    nodes = list(ast.walk(ast.parse(source)))
    constants = {
        target.id: node.value.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def is_parameters(node: ast.AST) -> bool:
        return re.search(r"\b(_?parameters|merged)\b", ast.unparse(node)) is not None

    def text(node: ast.AST) -> str:
        value = node.value if isinstance(node, ast.Constant) else constants.get(getattr(node, "id", ""))
        return value if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w.]{3,}", value) else ""

    for node in nodes:
        if isinstance(node, ast.Call):
            is_asked = is_parameters(node.func) or any(map(is_parameters, node.args))
            is_reader = re.search(rf"(self|reader)\._?({METHODS})$", ast.unparse(node.func))
            yield from (text(argument) for argument in node.args if is_asked or is_reader)
        elif isinstance(node, ast.Subscript) and is_parameters(node.value):
            yield text(node.slice)
        elif isinstance(node, ast.Compare) and is_parameters(node.comparators[0]):
            yield text(node.left)


def test_every_name_that_the_code_reads_is_listed() -> None:
    files = [file for name in READERS for file in (sorted((PACKAGE / name).rglob("*.py")) or [PACKAGE / name])]
    found = {name: file.name for file in files for name in names_read(file) if name}
    assert {"precision", "canary_share", "detection_head", "isolation", "kv_cache_mb"} <= found.keys()
    assert {name: file for name, file in found.items() if name not in read_names() | OTHER and not name.isupper()} == {}
