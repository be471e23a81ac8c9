"""A server under load whose work heats a simulated machine: models, sensors, clients, and the loop that joins them.

test_governor_closed_loop.py describes which parts are real and which are simulated.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from edge_server.client import Delivery, Frame, FrameDropped, FrameHeader, FrameResult, FrameStream
from tests.kit.model_folder import parameters
from tests.kit.models import picture_sum_config
from tests.plugins.governor.thermal_model import ThermalModel, ThermalModelConstants

TIME = 20.0
TICK_S = 0.2
BEGUN_S = 120 / TIME
"""The first two minutes of simulated time, in which the trip may be touched."""
SETTLED_S = 21.0
STEP_S = 37.0
"""When it becomes cold outside, or quiet."""
RECOVERY_S = 30.0
NOISE = 0.03
"""How much the allowed fraction may fall while it recovers."""

CONTROL, NORMAL, BULK = 1, 2, 3
NAMES = {CONTROL: "control", NORMAL: "normal", BULK: "bulk"}
DEADLINE_MS = {CONTROL: 500, NORMAL: 800, BULK: 1000}
RATES = {CONTROL: (2, 2.5), NORMAL: (5, 4.0), BULK: (10, 2.5)}
"""By class: threads, and requests a second of each. The heavy model is asked for 1.2 s of computing in a second."""
CAMERA_FPS = 15.0
SIDE = 8

MODULE = ThermalModelConstants(
    chip_j_per_k=2.0, sink_j_per_k=150 / TIME, chip_to_sink_k_per_w=1.0, sink_to_air_k_per_w=2.2,
    idle_w=5.0, dynamic_w=15.0, trip_c=99.0, critical_c=104.5,
)  # fmt: skip
CARD = ThermalModelConstants(
    chip_j_per_k=5.0, sink_j_per_k=450 / TIME, chip_to_sink_k_per_w=0.4, sink_to_air_k_per_w=0.7,
    idle_w=12.0, dynamic_w=40.0, leakage_w_at_50=1.0, trip_c=90.0, critical_c=98.0,
)  # fmt: skip
HW_THERMAL_SLOWDOWN = 0x40

FLAGS = ("--governor-interval-ms=200", "--rate-limit=execution_count")


# -- models

ONE_AT_A_TIME = 'instance_group { kind: KIND_CPU count: 1 rate_limiter { resources [ { name: "gpu" count: 1 } ] } }'


def detector(delay_ms: int, more: str = "") -> str:
    return f"""
    backend: "stub"
    max_batch_size: 1
    input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [4] }}
    output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [4] }}
    dynamic_batching {{ priority_levels: 3 default_priority_level: 2 }}
    parameters {{ key: "stub_delay_ms" value {{ string_value: "{delay_ms}" }} }}
    {ONE_AT_A_TIME}
    {more}
    """


CAMERA = picture_sum_config(SIDE, stub_delay_ms=10) + ONE_AT_A_TIME


def write_models(repository: Any) -> None:
    """Write a detector that names a lighter one, and a model for frames."""
    variant = parameters(variant="detector_small")
    repository.add("detector", detector(20, variant))
    repository.add("detector_small", detector(12))
    repository.add("camera", CAMERA)


# -- sensors


@dataclass
class HeatedMachine:
    """A simulated machine, warm from the start. `write` writes the simulated state to the files of the drivers."""

    constants: ThermalModelConstants
    hot_c: float
    cold_c: float
    """Outside, before and after STEP_S."""
    warm_sink_c: float
    set_point_c: float
    write: Callable[[ThermalModel], None]
    quiet: frozenset[int] = frozenset()
    """Classes that ask for nothing after STEP_S."""

    def __post_init__(self) -> None:
        self.plant = ThermalModel(self.constants, self.hot_c, sink_c=self.warm_sink_c, chip_c=self.warm_sink_c + 6.0)
        self.write(self.plant)


def jetson(board: Any) -> HeatedMachine:
    """Return a Jetson Orin Nano made of files."""

    def write(plant: ThermalModel) -> None:
        for kind in ("tj", "cpu", "soc0", "soc1", "soc2"):
            board.set_temperature(f"{kind}-thermal", plant.chip_c)
        board.set_rail("VDD_IN", plant.power_w)
        board.write(f"{board.cooler('soc0-throttle-alert')}/cur_state", int(plant.is_throttled))

    return HeatedMachine(MODULE, 50.0, 10.0, 72.0, 95.0, write)


def card(nvidia: Any) -> HeatedMachine:
    """Return an NVIDIA card that the fake library reports: whole degrees, milliwatts, millijoules."""

    def write(plant: ThermalModel) -> None:
        reasons = HW_THERMAL_SLOWDOWN if plant.is_throttled else 0
        power, energy = round(plant.power_w * 1000), round(plant.energy_j * 1000)
        nvidia.set(0, temperature0=round(plant.chip_c), power=power, energy=energy, reasons=reasons)

    return HeatedMachine(CARD, 45.0, 45.0, 66.0, 86.0, write, frozenset({NORMAL, BULK}))


# -- the load


@dataclass(frozen=True)
class Answer:
    """`word`: ok, shed (by the governor), late (refused for its deadline), or the error."""

    priority: int
    word: str
    at_s: float
    took_s: float
    variant: str = ""

    @property
    def class_name(self) -> str:
        return NAMES[self.priority]

    @property
    def is_in_time(self) -> bool:
        return self.word == "ok" and self.took_s <= DEADLINE_MS[self.priority] / 1000


@dataclass
class Load:
    """Clients of three classes, half of each over HTTP and half over gRPC, and two cameras of class bulk."""

    server: Any
    answers: list[Answer] = field(default_factory=list)
    quiet: frozenset[int] = frozenset()
    """Classes that ask for nothing any more."""

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(priority, index / threads / rate, 1 / rate, index % 2 == 0))
            for priority, (threads, rate) in RATES.items()
            for index in range(threads)
        ]
        self.cameras = [Camera(self, self._stop, number) for number in range(2)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the load, and wait until everything asked for was answered."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        for camera in self.cameras:
            camera.join()

    def _ask(self, priority: int, offset_s: float, period_s: float, is_http: bool) -> None:
        with contextlib.ExitStack() as stack:
            ask = (http_caller if is_http else grpc_caller)(self.server, priority, stack)
            due_s = time.monotonic() + offset_s
            while not self._stop.wait(max(0.0, due_s - time.monotonic())):
                if priority not in self.quiet:
                    begun_s = time.monotonic()
                    word, variant = ask()
                    now_s = time.monotonic()
                    self.answers.append(Answer(priority, word, now_s, now_s - begun_s, variant))
                # A late client does not catch up, as clients of cameras and motors do not.
                due_s = max(due_s + period_s, time.monotonic())


def http_caller(server: Any, priority: int, stack: contextlib.ExitStack) -> Callable[[], tuple[str, str]]:
    """Return a call over one keep-alive connection."""
    connection = stack.enter_context(contextlib.closing(server.connection()))
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    parameters = {"priority": priority, "edge_deadline_ms": DEADLINE_MS[priority]}
    body = json.dumps({"inputs": [tensor], "parameters": parameters})

    def ask() -> tuple[str, str]:
        connection.request("POST", "/v2/models/detector/infer", body)
        reply = connection.getresponse()
        answer = json.loads(reply.read())
        if reply.status == 200:
            return "ok", answer.get("parameters", {}).get("edge_variant", "")
        if reply.status == 429:
            wait, state = reply.headers["Retry-After"], reply.headers["Edge-Governor"]
            is_valid = wait.isdecimal() and int(wait) >= 1 and is_valid_refusal(answer["error"], state, priority)
            return "shed" if is_valid else f"429 {dict(reply.headers)} {answer}", ""
        return "late" if reply.status == 503 else f"{reply.status} {answer}", ""

    return ask


def grpc_caller(server: Any, priority: int, stack: contextlib.ExitStack) -> Callable[[], tuple[str, str]]:
    """Return a call over one channel."""
    # Channels to one address share a connection by default.
    channel = grpc.insecure_channel(server.grpc, options=[("grpc.use_local_subchannel_pool", 1)])
    stack.callback(channel.close)
    request = service_pb2.ModelInferRequest(model_name="detector", raw_input_contents=[bytes(16)])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 4])
    request.parameters["priority"].int64_param = priority
    request.parameters["edge_deadline_ms"].int64_param = DEADLINE_MS[priority]
    call = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        request_serializer=service_pb2.ModelInferRequest.SerializeToString,
        response_deserializer=service_pb2.ModelInferResponse.FromString,
    )

    def ask() -> tuple[str, str]:
        try:
            answer = call(request, timeout=30)
        except grpc.RpcError as error:
            trailers = dict(error.trailing_metadata())
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                pushback, state = trailers.get("grpc-retry-pushback-ms", ""), trailers.get("edge-governor", "")
                is_valid = pushback.isdecimal() and int(pushback) >= 50
                is_valid = is_valid and is_valid_refusal(error.details(), state, priority)
                return "shed" if is_valid else f"RESOURCE_EXHAUSTED {trailers} {error.details()}", ""
            return "late" if error.code() is grpc.StatusCode.UNAVAILABLE else f"{error.code()} {error.details()}", ""
        return "ok", answer.parameters["edge_variant"].string_param if "edge_variant" in answer.parameters else ""

    return ask


def is_valid_refusal(words: str, state: str, priority: int) -> bool:
    """Return whether a refusal names the model and the reason, and its state is one in which work is refused."""
    start = f"model 'detector{{}}' takes no more {NAMES[priority]} requests for now: the box is {state}: "
    is_named = any(words.startswith(start.format(ending)) for ending in ("", "_small"))
    return is_named and state in ("WARM", "HOT", "THROTTLED", "CRITICAL")


class Camera:
    """A stream of frames of class bulk that asks for a notice of every drop."""

    def __init__(self, load: Load, stop: threading.Event, number: int) -> None:
        self.results: list[FrameResult] = []
        self.drops: list[FrameDropped] = []
        self._stop = stop
        self._load = load
        self._stream = FrameStream(
            load.server.grpc,
            "camera",
            stream_id=f"camera {number}",
            delivery=Delivery(priority=BULK, notifies_drops=True),
            on_dropped=self.drops.append,
        )
        self._threads = [threading.Thread(target=self._offer), threading.Thread(target=self._take)]
        for thread in self._threads:
            thread.start()

    def _offer(self) -> None:
        seq = 0
        while not self._stop.wait(1 / CAMERA_FPS):
            if BULK not in self._load.quiet:
                seq += 1
                picture = bytes(3 * SIDE * SIDE)
                self._stream.send(Frame(FrameHeader(0, 0, "", seq), SIDE, SIDE, "rgb8", data=picture))
        self._stream.finish()

    def _take(self) -> None:
        self.results.extend(self._stream.results())

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        self._stream.close()


# -- the loop


@dataclass(frozen=True)
class TracePoint:
    at_s: float
    chip_c: float
    power_w: float
    busy: float
    share: float
    state: str
    lighter: str
    """The model that answers for the detector, "" for itself."""


@dataclass
class Outcome:
    load: Load
    trace: list[TracePoint]
    machine: HeatedMachine
    report: dict[str, Any]
    log: str

    def of(self, class_name: str) -> list[Answer]:
        return [answer for answer in self.load.answers if answer.class_name == class_name]

    def between(self, begin_s: float, end_s: float) -> list[TracePoint]:
        return [point for point in self.trace if begin_s <= point.at_s < end_s]

    def shed(self) -> Counter[str]:
        """Return the refusals that the server reports, by class."""
        counts: Counter[str] = Counter()
        for row in self.report["shed"]:
            counts[row["class"]] += row["count"]
        return counts

    @property
    def settled(self) -> list[TracePoint]:
        return self.between(SETTLED_S, STEP_S)


def busy_s(server: Any) -> float:
    """Return the seconds that all models computed since the server started."""
    status, answer = server.ask("/v2/models/stats")
    assert status == 200, answer
    batches = [batch for model in answer["model_stats"] for batch in model["batch_stats"]]
    return (
        sum(batch[part]["ns"] for batch in batches for part in ("compute_input", "compute_infer", "compute_output"))
        / 1e9
    )


def governor(server: Any) -> dict[str, Any]:
    status, answer = server.ask("/edge/v1/governor")
    assert status == 200
    return dict(answer)


def run_loop(server: Any, machine: HeatedMachine) -> Outcome:
    """Let the server heat the simulated machine, then improve its cooling, and run until nothing is limited."""
    plant = machine.plant
    load = Load(server)
    trace: list[TracePoint] = []
    begun_s = then_s = time.monotonic()
    before_s = busy_s(server)
    try:
        while (at_s := time.monotonic() - begun_s) < STEP_S + RECOVERY_S:
            time.sleep(TICK_S)
            now_busy_s, now_s = busy_s(server), time.monotonic()
            busy = min(1.0, (now_busy_s - before_s) / (now_s - then_s))
            plant.step(busy, now_s - then_s)
            before_s, then_s = now_busy_s, now_s
            machine.write(plant)
            told = governor(server)
            lighter = told["variants_in_force"].get("detector", "")
            trace.append(TracePoint(at_s, plant.chip_c, plant.power_w, busy, told["share"], told["state"], lighter))
            if at_s >= STEP_S:
                plant.ambient_c, load.quiet = machine.cold_c, machine.quiet
            if at_s >= STEP_S and told["share"] >= 1.0:
                break
    finally:
        load.stop()
    return Outcome(load, trace, machine, governor(server), server.log())
