"""The Ray Serve application with a real Ray, and unmodified clients."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from edge_server.telemetry.metrics_page import Family
from tests.kit.infer_input import infer_input

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray Serve, of the extra test-all"),
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("ray"),
]

SLEEPER = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.1)
        tensors = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", tensor)]) for tensor in tensors]
"""
TENSORS = (
    'input { name: "INPUT0" data_type: TYPE_INT32 dims: [1] } '
    'output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [1] }'
)
REPEAT = (
    "model_transaction_policy { decoupled: true } "
    'input { name: "COUNT" data_type: TYPE_INT32 dims: [1] } output { name: "NUMBER" data_type: TYPE_INT32 dims: [1] }'
)
REPEATER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("NUMBER", np.array([number], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CLIENTS = 6


class Cluster:
    def __init__(self, models: Path, log: Path) -> None:
        self.models = models
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            two.bind(("127.0.0.1", 0))
            self.http_port, self.grpc_port = one.getsockname()[1], two.getsockname()[1]
        token = log.with_name("token")
        token.write_text(secrets.token_hex(32))
        environment = {
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),  # else Ray makes ~/.ray/auth_token
            "RAY_raylet_start_wait_time_s": "120",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
            "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
            # Ray's defaults are ten seconds.
            "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
            "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
        }
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        self._log = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ray_cluster.py")), str(self.http_port), str(self.grpc_port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            self.metrics_address = self._expect("started").split()[1]
        except BaseException:
            self.close()
            raise

    def deploy(self, **options: Any) -> None:
        self._order({"model_repository": str(self.models), **options})

    def delete(self, name: str) -> None:
        self._order({"delete": name})

    def _order(self, line: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()
        self._expect("ready")

    def replicas(self) -> list[int]:
        """Process ids of the replicas."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica:default:edge_server"):
                    found.append(int(folder.name))
        return found

    def _expect(self, word: str) -> str:
        """Return the next line that starts with the word."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.split()[:1] == [word]:
                return line
        raise AssertionError(f"the cluster ended before it was {word}; see {self._log.name}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self._log.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    models = tmp_path_factory.mktemp("models")
    for name, code, config in (("sleeper", SLEEPER, TENSORS), ("repeat", REPEATER, REPEAT)):
        (models / name / "1").mkdir(parents=True)
        (models / name / "1/model.py").write_text(code)
        (models / name / "config.pbtxt").write_text('backend: "python" ' + config)
    (models / "broken/1").mkdir(parents=True)
    (models / "broken/1/model.onnx").write_bytes(b"no model")
    opened = Cluster(models, tmp_path_factory.mktemp("log") / "ray.log")
    try:
        yield opened
    finally:
        opened.close()


def infer_grpc(client: grpc_client.InferenceServerClient, value: int) -> int:
    item = infer_input(grpc_client, "INPUT0", np.array([value], np.int32))
    return int(client.infer("sleeper", [item]).as_numpy("OUTPUT0")[0])


def infer_http(client: http_client.InferenceServerClient, value: int) -> int:
    item = infer_input(http_client, "INPUT0", np.array([value], np.int32))
    return int(client.infer("sleeper", [item]).as_numpy("OUTPUT0")[0])


class Load:
    """Clients, half of them over each wire, that send requests one after another while the block runs."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._must_end = threading.Event()
        self.answered: list[float] = []
        self.lost: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._must_end.set()
        for thread in self._threads:
            thread.join(60)

    def wait_for(self, count: int) -> None:
        """Wait until so many more requests have an answer or are lost."""
        goal = len(self.answered) + len(self.lost) + count
        while len(self.answered) + len(self.lost) < goal:
            assert any(thread.is_alive() for thread in self._threads)
            time.sleep(0.01)

    def _run(self, number: int) -> None:
        client: Any
        infer: Callable[[Any, int], int]
        if number % 2:
            client, infer = grpc_client.InferenceServerClient(f"127.0.0.1:{self._cluster.grpc_port}"), infer_grpc
        else:
            client, infer = http_client.InferenceServerClient(f"127.0.0.1:{self._cluster.http_port}"), infer_http
        with client:
            value = 0
            while not self._must_end.is_set():
                value += 1
                try:
                    assert infer(client, value) == value
                    self.answered.append(time.monotonic())
                except InferenceServerException as error:
                    self.lost.append(f"{infer.__name__}: {error}")


def test_unmodified_clients_get_answers_errors_and_streams(cluster: Cluster) -> None:
    cluster.deploy(num_replicas=1)
    with (
        grpc_client.InferenceServerClient(f"127.0.0.1:{cluster.grpc_port}") as over_grpc,
        http_client.InferenceServerClient(f"127.0.0.1:{cluster.http_port}") as over_http,
    ):
        assert infer_grpc(over_grpc, 7) == infer_http(over_http, 7) == 7
        for client in (over_grpc, over_http):
            assert client.is_server_live()
            assert client.is_model_ready("sleeper")
            assert not client.is_model_ready("broken")  # and the replica stays
            with pytest.raises(InferenceServerException, match="nosuch"):
                client.get_model_metadata("nosuch")
        plain = http.client.HTTPConnection("127.0.0.1", cluster.http_port)
        plain.putrequest("GET", "/v2/models/sleeper", skip_accept_encoding=True)
        plain.endheaders()
        assert json.loads(plain.getresponse().read())["name"] == "sleeper"
        plain.close()
        assert over_grpc.get_model_config("sleeper").config.backend == "python"
        assert over_http.get_model_config("sleeper")["backend"] == "python"
        with pytest.raises(InferenceServerException, match="UNIMPLEMENTED"):
            over_grpc.unload_model("sleeper")
        with pytest.raises(InferenceServerException, match="Change the model repository"):
            over_http.unload_model("sleeper")
        found: queue.Queue[Any] = queue.Queue()
        over_grpc.start_stream(lambda result, error: found.put((result, error)))
        item = infer_input(grpc_client, "COUNT", np.array([3], np.int32))
        over_grpc.async_stream_infer("repeat", [item])
        numbers = []
        for _ in range(3):
            result, error = found.get(timeout=30)
            assert error is None
            numbers.append(int(result.as_numpy("NUMBER")[0]))
        over_grpc.stop_stream()
        assert numbers == [0, 1, 2]


# Each of those marked `long` starts replicas anew, which takes 10 to 45 s.
@pytest.mark.long
def test_http_selects_an_application_by_prefix_and_grpc_by_metadata(cluster: Cluster) -> None:
    cluster.deploy(num_replicas=1)
    cluster.deploy(num_replicas=1, name="second", route_prefix="/second", id="the-second")
    try:
        with grpc_client.InferenceServerClient(f"127.0.0.1:{cluster.grpc_port}") as client:
            for name, server_id in (("default", "triton"), ("second", "the-second")):
                assert client.get_server_metadata({"application": name}).name == server_id
            with pytest.raises(InferenceServerException, match=r"[Aa]pplication metadata"):
                client.get_server_metadata()
        for prefix, server_id in (("", "triton"), ("/second", "the-second")):
            with http_client.InferenceServerClient(f"127.0.0.1:{cluster.http_port}{prefix}") as client:
                assert client.get_server_metadata()["name"] == server_id
                assert infer_http(client, 5) == 5
    finally:
        cluster.delete("second")
    with grpc_client.InferenceServerClient(f"127.0.0.1:{cluster.grpc_port}") as client:
        assert client.is_server_live()  # one application needs no metadata


@pytest.mark.long
def test_the_metrics_of_each_replica_are_among_those_of_ray(cluster: Cluster) -> None:
    def samples(name: str, model: str) -> dict[str, float]:
        """The values of a metric by the replica."""
        with urllib.request.urlopen(f"http://{cluster.metrics_address}/metrics") as answer:
            families = text_string_to_metric_families(answer.read().decode())
        wanted = {"application": "measured", "deployment": "edge_server", "model": model, "version": "1"}
        return {
            sample.labels["replica"]: sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and wanted.items() <= {"version": "1", **sample.labels}.items()
        }

    cluster.deploy(num_replicas=2, name="measured", route_prefix="/measured")
    try:
        with http_client.InferenceServerClient(f"127.0.0.1:{cluster.http_port}/measured") as client:
            for value in range(40):
                infer_http(client, value)
        end_s = time.monotonic() + 120
        while True:
            found = samples("ray_nv_inference_request_success_total", "sleeper")
            failed = samples("ray_edge_model_load_failures_total", "broken")
            if sum(found.values()) >= 40 and list(failed.values()) == [1, 1]:
                break
            assert time.monotonic() < end_s, (found, failed)
            time.sleep(1)
        assert sum(found.values()) == 40
        assert set(found) <= set(failed)
    finally:
        cluster.delete("measured")


@pytest.mark.long
def test_two_replicas_almost_double_throughput_and_scaling_loses_no_request(cluster: Cluster) -> None:
    def rate(load: Load) -> float:
        load.wait_for(10)
        load.wait_for(60)
        recent = load.answered[-60:]
        return 59 / (recent[-1] - recent[0])

    cluster.deploy(num_replicas=1)
    with Load(cluster) as load:
        one = rate(load)
        cluster.deploy(num_replicas=2)
        two = rate(load)
        cluster.deploy(num_replicas=1)
        load.wait_for(50)
    print(f"\n1 replica {one:.1f}/s, 2 replicas {two:.1f}/s, ratio {two / one:.2f}; {len(load.answered)} answered")
    assert load.lost == []
    assert two / one >= 1.7


@pytest.mark.long
def test_the_queue_length_sets_the_number_of_replicas(cluster: Cluster) -> None:
    def wait_for_replicas(count: int) -> None:
        end_s = time.monotonic() + 120
        while len(cluster.replicas()) != count:
            assert time.monotonic() < end_s, cluster.replicas()
            time.sleep(0.1)

    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "look_back_period_s": 3}
    cluster.deploy(autoscaling_config={**scaling, "upscale_delay_s": 1, "downscale_delay_s": 2})
    wait_for_replicas(1)
    with Load(cluster) as load:
        wait_for_replicas(2)
        load.wait_for(100)
    wait_for_replicas(1)
    assert load.lost == []


def test_a_killed_replica_loses_at_most_its_running_requests(cluster: Cluster) -> None:
    cluster.deploy(num_replicas=2)
    with Load(cluster) as load:
        load.wait_for(50)
        victim = cluster.replicas()[0]
        os.kill(victim, signal.SIGKILL)
        load.wait_for(150)
        deadline = time.monotonic() + 120
        while len(cluster.replicas()) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(cluster.replicas()) == 2
        load.wait_for(50)
    print(f"\n{len(load.answered)} answered, lost: {load.lost}")
    assert len(load.lost) <= CLIENTS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own use of pydantic
def test_metrics_outlive_a_reload_and_an_unload_of_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import edge_server.ray

    totals: dict[tuple[str, str], float] = {}

    class Recorded:
        """Replaces a Counter and a Gauge of Ray, which cannot be read back."""

        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert tag_keys == ("model",)
            self.name = name

        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert value > 0  # Ray's condition
            totals[self.name, tags["model"]] = totals.get((self.name, tags["model"]), 0) + value

        def set(self, value: float, tags: dict[str, str]) -> None:
            totals[self.name, tags["model"]] = value

    def families(counts: dict[str, int], ready: dict[str, int]) -> list[Family]:
        counter, gauge = Family("n_total", "counter", "help"), Family("g", "gauge", "help")
        for family, values in ((counter, counts), (gauge, ready)):
            for name, value in values.items():
                family.add({"model": name}, value)
        return [counter, gauge, Family("empty", "gauge", "help")]

    monkeypatch.setattr(edge_server.ray.metrics, "Counter", Recorded)
    monkeypatch.setattr(edge_server.ray.metrics, "Gauge", Recorded)
    reporter = edge_server.ray._MetricsReporter()
    reporter.report(families({"a": 5, "b": 0}, {"a": 1, "b": 1}))
    reporter.report(families({"a": 8, "b": 1}, {"a": 1, "b": 1}))
    assert totals == {("n", "a"): 8, ("n", "b"): 1, ("g", "a"): 1, ("g", "b"): 1}
    reporter.report(families({"a": 2}, {"a": 1}))  # a was loaded again, b unloaded
    assert totals == {("n", "a"): 10, ("n", "b"): 1, ("g", "a"): 1, ("g", "b"): 0}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own use of pydantic
def test_the_shipped_file_is_valid_and_its_settings_are_applied() -> None:
    import ray.serve.schema
    import yaml

    text = (Path(__file__).parents[2] / "fleet/ray/serve.yaml").read_text()
    found = ray.serve.schema.ServeDeploySchema.model_validate(yaml.safe_load(text))
    (application,) = found.applications
    assert application.import_path == "edge_server.ray:build_app"
    assert application.args["autoscaling_config"]["target_ongoing_requests"] == 2
    assert set(application.args) == {"model_repository", "max_ongoing_requests", "autoscaling_config"}
