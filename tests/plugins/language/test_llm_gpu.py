"""Language models on a GPU: layers of llama.cpp on CUDA, by a library that says that it has CUDA and computes on the
CPU.

No GPU has run this.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_server.backends.base import ModelFile, OpenJob
from edge_server.core.model_spec import InstanceKind
from edge_server.errors import BackendMissing, LoadError
from edge_server.plugins.language import backend as language
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions, resolve
from edge_server.serving.execution.gpu_state import gpus_of

pytestmark = pytest.mark.full

xllamacpp = pytest.importorskip("xllamacpp", reason="needs xllamacpp, of the extra test-all")

TINY = Path(__file__).parents[2] / "data/tiny_llm/tiny.gguf"
ON_GPU = "instance_group { kind: KIND_GPU }"


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., OpenJob]:
    """Return a function that resolves a model on a machine with two GPUs. `device_id` is that of the instance."""

    def make(*lines: str, backend: str = "llama_cpp", device_id: int | None = None) -> OpenJob:
        folder = tmp_path / "talker"
        (folder / "1").mkdir(parents=True, exist_ok=True)
        (folder / "1/model.gguf").write_bytes(TINY.read_bytes())
        (folder / "config.pbtxt").write_text("\n".join((f'backend: "{backend}"', *lines)))
        model = Scanner([tmp_path]).find("talker")
        assert model is not None
        spec = resolve(model, 1, ResolveOptions(auto_complete=True, gpu_count=2)).spec
        return OpenJob(spec, ModelFile(folder / "1/model.gguf", folder, 1), "talker_0_0", device_id)

    return make


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have the library name two GPUs. Return the parameters that its servers were made with."""
    made: list[Any] = []
    real = xllamacpp.Server

    def server(parameters: Any) -> Any:
        made.append(parameters)
        return real(parameters)

    monkeypatch.setattr(xllamacpp, "get_device_info", lambda: [{"name": name} for name in ("CUDA0", "CUDA1", "CPU")])
    monkeypatch.setattr(xllamacpp, "Server", server)
    monkeypatch.setattr(os, "nice", lambda count: 0)
    monkeypatch.setattr(os, "putenv", lambda name, value: None)
    return made


def test_the_layers_and_the_gpu_of_the_instance_reach_the_library(job: Callable[..., OpenJob], cuda: list[Any]) -> None:
    session = language.open_llama_cpp(job(ON_GPU, parameter("gpu_layers", "1"), device_id=1))
    session.close()
    [parameters] = cuda
    assert (parameters.n_gpu_layers, parameters.main_gpu) == (1, 1)
    assert parameters.split_mode == xllamacpp.llama_split_mode.LLAMA_SPLIT_MODE_NONE
    assert not parameters.fit_params
    assert session.info.device == "GPU:1"
    assert session.info.options["gpu_layers"] == "1"


def test_without_a_number_all_layers_are_on_the_gpu_and_those_of_a_draft_model(
    job: Callable[..., OpenJob], cuda: list[Any], tmp_path: Path
) -> None:
    draft = tmp_path / "talker/1/draft.gguf"
    draft.parent.mkdir(parents=True)
    draft.write_bytes(TINY.read_bytes())
    opened = job(ON_GPU, parameter("draft_model", "draft.gguf"), device_id=0)
    language.open_llama_cpp(opened).close()
    [parameters] = cuda
    assert parameters.n_gpu_layers >= 999
    assert parameters.speculative.draft.n_gpu_layers == parameters.n_gpu_layers


def test_on_the_processor_no_layer_is_on_a_gpu_and_its_process_sees_none(
    job: Callable[..., OpenJob], cuda: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build with CUDA would take a GPU that no gate has counted."""
    told: dict[str, str] = {}
    monkeypatch.setattr(os, "putenv", told.__setitem__)
    session = language.open_llama_cpp(job())
    session.close()
    [parameters] = cuda
    assert (parameters.n_gpu_layers, parameters.speculative.draft.n_gpu_layers) == (0, 0)
    assert told["CUDA_VISIBLE_DEVICES"] == ""
    assert session.info.device == "CPU"


def test_threads_that_wait_for_each_other_sleep_soon(
    job: Callable[..., OpenJob], cuda: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they spin while another process has a core of theirs."""
    told: dict[str, str] = {}
    monkeypatch.setattr(os, "putenv", told.__setitem__)
    language.open_llama_cpp(job()).close()
    assert int(told["GOMP_SPINCOUNT"]) <= 1000


def test_a_library_without_cuda_is_refused_and_the_error_says_what_to_install(
    job: Callable[..., OpenJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "nice", lambda count: 0)
    with pytest.raises(BackendMissing) as caught:
        language.open_llama_cpp(job(ON_GPU, device_id=0))
    assert str(caught.value) == (
        f"model 'talker': instance_group asks for GPU 0, but xllamacpp {xllamacpp.__version__} sees only CPU: PyPI's "
        "package computes on the CPU. Install its wheel for CUDA, from the index that the project's page names, or "
        "build it with XLLAMACPP_BUILD_CUDA=1; KIND_CPU serves the model as it is"
    )


def test_gpu_layers_alone_put_the_model_on_the_gpus_so_that_their_gate_counts_it(job: Callable[..., OpenJob]) -> None:
    spec = job(parameter("gpu_layers", "20")).spec
    assert [group.kind for group in spec.instance_groups] == [InstanceKind.GPU]
    assert gpus_of(spec) == (0, 1)
    assert gpus_of(job("instance_group { kind: KIND_GPU gpus: [1] }", parameter("gpu_layers", "20")).spec) == (1,)
    assert gpus_of(job().spec) == ()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("instance_group { kind: KIND_CPU }", parameter("gpu_layers", "1")),
         "parameter gpu_layers: expected an instance_group of kind KIND_GPU, given KIND_CPU"),
        ((ON_GPU, parameter("gpu_layers", "-1")), "parameter gpu_layers must be a whole number from 1, got '-1'"),
    ],
)  # fmt: skip
def test_layers_without_a_gpu_and_wrong_numbers_are_refused(
    job: Callable[..., OpenJob], monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(os, "nice", lambda count: 0)
    with pytest.raises(LoadError, match=message):
        language.open_llama_cpp(job(*lines))


@pytest.mark.parametrize("line", [ON_GPU, parameter("gpu_layers", "1")])
def test_engines_that_compute_on_the_cpu_only_refuse_a_gpu(
    job: Callable[..., OpenJob], monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(os, "nice", lambda count: 0)
    with pytest.raises(LoadError, match=r"backend openvino_genai computes on the CPU.*llama_cpp"):
        language.open_openvino(job(line, backend="openvino_genai"))


def test_the_projector_for_pictures_is_on_the_gpu_of_the_instance(
    job: Callable[..., OpenJob], cuda: list[Any], tmp_path: Path
) -> None:
    projector = tmp_path / "talker/1/mmproj-tiny.gguf"
    projector.parent.mkdir(parents=True)
    projector.write_bytes((TINY.parents[1] / "tiny_mmproj/mmproj-tiny.gguf").read_bytes())
    opened = job(ON_GPU, device_id=1)
    # The library checks the name.
    with pytest.raises(LoadError, match="invalid device: CUDA1"):
        language.open_llama_cpp(opened)
