"""Ensembles as Triton's folders describe them, on an installed server: chains of real models, pictures, reloads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.kit.eventually import eventually
from tests.kit.infer_input import infer_input
from tests.kit.model_folder import parameters
from tests.kit.models import BUNDLED, REPEAT, identity_config
from tests.kit.server import serve
from tests.kit.triton_stream import TritonStream

# (x + y, x - y) -> add_sub again: (2x, 2y)
CHAIN = """
platform: "ensemble"
max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 16 ] }, { name: "Y" data_type: TYPE_FP32 dims: [ 16 ] } ]
output [ { name: "TWICE_X" data_type: TYPE_FP32 dims: [ 16 ] }, { name: "TWICE_Y" data_type: TYPE_FP32 dims: [ 16 ] } ]
ensemble_scheduling {
  step [
    {
      model_name: "FIRST"
      model_version: -1
      input_map { key: "INPUT0" value: "X" }
      input_map { key: "INPUT1" value: "Y" }
      output_map { key: "OUTPUT0" value: "sum" }
      output_map { key: "OUTPUT1" value: "difference" }
    },
    {
      model_name: "SECOND"
      model_version: -1
      input_map { key: "INPUT0" value: "sum" }
      input_map { key: "INPUT1" value: "difference" }
      output_map { key: "OUTPUT0" value: "TWICE_X" }
      output_map { key: "OUTPUT1" value: "TWICE_Y" }
    }
  ]
}
"""

OUTER = """
platform: "ensemble"
max_batch_size: 4
input [ { name: "A" data_type: TYPE_FP32 dims: [ 16 ] }, { name: "B" data_type: TYPE_FP32 dims: [ 16 ] } ]
output [ { name: "SUM" data_type: TYPE_FP32 dims: [ 16 ] } ]
ensemble_scheduling {
  step [
    { model_name: "chain" input_map [ { key: "X" value: "A" }, { key: "Y" value: "B" } ]
      output_map [ { key: "TWICE_X" value: "a2" }, { key: "TWICE_Y" value: "b2" } ] },
    { model_name: "second" input_map [ { key: "INPUT0" value: "a2" }, { key: "INPUT1" value: "b2" } ]
      output_map { key: "OUTPUT0" value: "SUM" } }
  ]
}
"""

# From an image to class scores: the classifier is used unchanged as a step.
CAMERA = """
platform: "ensemble"
max_batch_size: 8
input { name: "image" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 224, 224 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ 1000 ] }
parameters { key: "image_fit"    value { string_value: "crop" } }
parameters { key: "image_resize" value { string_value: "256" } }
parameters { key: "image_color"  value { string_value: "rgb" } }
parameters { key: "image_scale"  value { string_value: "1" } }
parameters { key: "image_mean"   value { string_value: "127" } }
parameters { key: "image_stddev" value { string_value: "128" } }
parameters { key: "image_top_k"  value { string_value: "3" } }
ensemble_scheduling {
  step { model_name: "efficientnet_lite0"
         input_map { key: "input" value: "image" } output_map { key: "probabilities" value: "scores" } }
}
"""

STREAM = """
platform: "ensemble"
model_transaction_policy { decoupled: true }
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
        { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] } ]
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
ensemble_scheduling {
  step [
    { model_name: "repeat" input_map [ { key: "IN" value: "IN" }, { key: "DELAY" value: "DELAY" },
                                       { key: "WAIT" value: "WAIT" } ]
      output_map { key: "OUT" value: "each" } },
    { model_name: "same" input_map { key: "INPUT0" value: "each" } output_map { key: "OUTPUT0" value: "OUT" } }
  ]
}
"""


def chain(first: str = "first", second: str = "second") -> str:
    return CHAIN.replace("FIRST", first).replace("SECOND", second)


def write_members(repository: Any) -> None:
    for name in ("first", "second"):
        repository.add_sub(name, 'backend: "onnxruntime"\nmax_batch_size: 4')


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    write_members(module_repository)
    module_repository.add("chain", chain())
    module_repository.add("a_outer", OUTER)
    module_repository.add("repeat", REPEAT)
    module_repository.add("same", identity_config("INT32", "1", batch=0))
    module_repository.add("stream", STREAM)
    module_repository.add("camera", CAMERA)
    (module_repository.path / "efficientnet_lite0").symlink_to(BUNDLED / "efficientnet_lite0")
    with serve(module_repository.path, "--allow-external-links") as running:
        yield running
        running.stop_cleanly()


def tensors(client: Any, names: tuple[str, str], rows: int = 2) -> tuple[list[Any], np.ndarray, np.ndarray]:
    left, right = (np.random.default_rng(seed).random((rows, 16), np.float32) for seed in (1, 2))
    made = []
    for name, array in zip(names, (left, right), strict=True):
        made.append(infer_input(client, name, array))
    return made, left, right


@pytest.mark.parametrize("protocol", [triton_http, triton_grpc])
def test_chained_and_nested_ensembles_answer_over_http_and_grpc(server: Any, protocol: Any) -> None:
    url = server.http if protocol is triton_http else server.grpc
    with protocol.InferenceServerClient(url) as client:
        made, left, right = tensors(protocol, ("X", "Y"))
        result = client.infer("chain", made, request_id="7")
        np.testing.assert_allclose(result.as_numpy("TWICE_X"), 2 * left, rtol=1e-5)
        np.testing.assert_allclose(result.as_numpy("TWICE_Y"), 2 * right, rtol=1e-4, atol=1e-5)
        made, left, right = tensors(protocol, ("A", "B"))
        result = client.infer("a_outer", made)
        np.testing.assert_allclose(result.as_numpy("SUM"), 2 * left + 2 * right, rtol=1e-5)
        made, left, _ = tensors(protocol, ("X", "Y"))
        only = client.infer("chain", made, outputs=[protocol.InferRequestedOutput("TWICE_X")])
        np.testing.assert_allclose(only.as_numpy("TWICE_X"), 2 * left, rtol=1e-5)
        assert only.as_numpy("TWICE_Y") is None


def test_an_ensemble_has_metadata_configuration_statistics_and_an_index_entry(server: Any) -> None:
    with triton_http.InferenceServerClient(server.http) as client:
        made, *_ = tensors(triton_http, ("X", "Y"), 3)
        client.infer("chain", made)
        metadata = client.get_model_metadata("chain")
        assert (metadata["platform"], metadata["versions"]) == ("ensemble", ["1"])
        assert metadata["inputs"][0] == {"name": "X", "datatype": "FP32", "shape": [-1, 16]}
        config = client.get_model_config("chain")
        assert (config["platform"], config["backend"]) == ("ensemble", "")
        assert not config.get("instance_group")
        assert [step["model_name"] for step in config["ensemble_scheduling"]["step"]] == ["first", "second"]
        told = client.get_inference_statistics("chain")["model_stats"][0]
        assert told["inference_stats"]["success"]["count"] == told["execution_count"] > 0
        assert told["inference_stats"]["compute_infer"]["ns"] > 0
        assert client.get_inference_statistics("first")["model_stats"][0]["execution_count"] > 0
        index = client.get_model_repository_index()
        assert any({"name": "chain", "version": "1", "state": "READY"}.items() <= item.items() for item in index)
    assert 'nv_inference_request_success{model="chain",version="1"}' in server.read_metrics()


def test_an_ensemble_runs_frames_of_a_frame_stream(server: Any) -> None:
    from edge_server.client import FrameStream, Returns

    frames = [np.zeros((480, 640, 3), np.uint8)]
    with FrameStream(server.grpc, "camera", returns=Returns(top_k=3)) as stream:
        results = list(stream.results(iter(frames)))
    assert len(results) == 1
    assert results[0].classes


def stream_inputs(values: list[int]) -> list[Any]:
    arrays = {
        "IN": np.array(values, np.int32), "DELAY": np.zeros(len(values), np.uint32), "WAIT": np.zeros(1, np.uint32),
    }  # fmt: skip
    made = []
    for name, array in arrays.items():
        made.append(infer_input(triton_grpc, name, array, "INT32" if name == "IN" else "UINT32"))
    return made


def test_a_decoupled_member_streams_through_the_ensemble(server: Any) -> None:
    with TritonStream(server.grpc) as stream:
        stream.send("stream", stream_inputs([5, 6, 7]), enable_empty_final_response=True)
        assert [int(result.as_numpy("OUT")[0]) for result in stream.until_final()] == [5, 6, 7]
    with (
        triton_grpc.InferenceServerClient(server.grpc) as client,
        pytest.raises(InferenceServerException, match="decoupled"),
    ):
        client.infer("stream", stream_inputs([1]))


def test_members_reloaded_under_load_lose_no_request(repository: Any) -> None:
    write_members(repository)
    repository.add("chain", chain())
    flags = ("--model-control-mode=explicit", "--load-model=chain")
    with serve(repository.path, *flags) as server, triton_http.InferenceServerClient(server.http) as control:
        assert control.is_model_ready("first"), "an ensemble brings what it is made of"
        stop, wrong, counts = threading.Event(), [], [0, 0]

        def work(index: int) -> None:
            with triton_grpc.InferenceServerClient(server.grpc) as client:
                made, left, _ = tensors(triton_grpc, ("X", "Y"))
                while not stop.is_set():
                    try:
                        result = client.infer("chain", made)
                        np.testing.assert_allclose(result.as_numpy("TWICE_X"), 2 * left, rtol=1e-5)
                    except (InferenceServerException, AssertionError) as error:
                        wrong.append(error)
                    counts[index] += 1

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        assert eventually(lambda: min(counts) > 0)
        for number in range(4):
            member = ("first", "second")[number % 2]
            note = parameters(note=number)
            repository.add(member, f'backend: "onnxruntime"\nmax_batch_size: 4\n{note}')
            control.load_model(member)
        stop.set()
        for thread in threads:
            thread.join(20)
        assert wrong == []
        control.unload_model("second")

        def entry() -> dict[str, str]:
            return next(item for item in control.get_model_repository_index() if item["name"] == "chain")

        assert eventually(lambda: entry()["state"] == "UNAVAILABLE")
        assert "model 'second' is not loaded" in entry()["reason"]
        control.load_model("chain")
        assert control.is_model_ready("second")
        control.unload_model("chain", unload_dependents=True)
        assert server.stop() == 0
