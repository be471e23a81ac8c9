"""Conversion of frames to tensors: the measurements behind the choices in edge_server/plugins/vision.

    python tests/bench/preprocessing.py [ROUNDS]

Every table compares ways to the same result, measured in turns on one thread, by the median of the rounds; the ratio
to the first line is what carries over to other machines. One JPEG line needs simplejpeg, and is left out without it.

Results on two shared cores of an x86-64 machine with AVX-512, and the choices made:

- Outside the graph. In front of the classifier, OpenVINO's PrePostProcessor takes 1.2 times as long in all as our
  `write`, and operations in the ONNX graph 2.2 times: their resizing in FP32 costs more than the whole of ours, which
  works on bytes. Outside, it also runs beside the model, on the threads of the streams.
- Values through a table of OpenCV's LUT: the bits of the table computed in double precision, at the price of arithmetic
  in FP32. Against a look-up in numpy, one a channel, a frame takes 0.85 of the time to 224 (resizing is the rest), 0.5
  letterboxed to 640; as packed bytes 0.5 and 0.1.
- JPEG by OpenCV. simplejpeg decodes to the same pixels 10 percent faster, which is not worth a second library.
- `image_decode fast` takes 0.7 of the time from a JPEG to the tensor, and changes values by 0.3 of 255 in the mean and
  up to 25 at single ones: hence only where it is declared.
- One thread: OpenCV's own threads make two workers beside a model no faster, or slower.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import TensorProto, compose, helper, numpy_helper

from edge_server.core.model_spec import InputSpec, ModelSpec
from edge_server.core.tensor import DType
from edge_server.memory.malloc_settings import keep_big_blocks
from edge_server.plugins.vision.image_plan import ImagePlan, make_image_plan
from edge_server.plugins.vision.picture import Picture
from edge_server.plugins.vision.resize import Color, channel_order, place, resized
from edge_server.protocol.frame_messages import Frame, FrameHeader

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "model_repository/efficientnet_lite0/1/model.onnx"
PHOTO = ROOT / "tests/data/coffee.jpg"
NORMALISED = {"image_scale": "1", "image_mean": "123.7,116.3,103.5", "image_stddev": "58.4,57.1,57.4"}
PLAIN = {"image_scale": "1"}

Calls = dict[str, Callable[[], object]]


def compare(title: str, calls: Calls, rounds: int) -> None:
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_once(call))
    first = times[next(iter(times))]
    print(f"\n{title}")
    for name, spans in times.items():
        ratio = statistics.median(one / other for one, other in zip(spans, first, strict=True))
        print(f"  {1e3 * statistics.median(spans):8.3f} ms  {ratio:5.2f}  {name}")


def _once(call: Callable[[], object]) -> float:
    """Seconds a call, over enough calls to make five milliseconds."""
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < 0.005:
        call()
        count += 1
    return passed / count


def plan_of(parameters: dict[str, str], side: int, dtype: DType, *, is_packed: bool = False) -> ImagePlan:
    dims = (side, side, 3) if is_packed else (3, side, side)
    made = make_image_plan(ModelSpec("net", "", "", 8, (InputSpec("x", dtype, dims),), (), (), parameters=parameters))
    assert made is not None
    return made


def frame(width: int, height: int) -> np.ndarray:
    picture = cv2.resize(cv2.imread(str(PHOTO)), (width, height), interpolation=cv2.INTER_CUBIC)
    noise = np.random.default_rng(0).normal(0, 3, picture.shape)
    return np.clip(picture + noise, 0, 255).astype(np.uint8)


# (a) Outside the graph.


def by_numpy_table(plan: ImagePlan, image: np.ndarray, row: np.ndarray) -> None:
    """One look-up in numpy a channel, straight from the packed picture: what `write` did before."""
    placement = place(plan.rule, image.shape[1], image.shape[0])
    visible = resized(image, placement, plan.rule, "bench")
    planes = row if row.shape[0] == 3 else row.transpose(2, 0, 1)
    table = plan.values.table
    if visible.shape[:2] != planes.shape[1:]:
        for channel, value in enumerate(plan.pad):
            planes[channel] = table[channel, value]
    top, left = max(0, placement.top), max(0, placement.left)
    window = planes[:, top : top + visible.shape[0], left : left + visible.shape[1]]
    for channel, source in enumerate(channel_order(Color.BGR, plan.color)):
        np.take(table[channel], visible[:, :, source], out=window[channel], mode="clip")


def by_arithmetic(plan: ImagePlan, image: np.ndarray, row: np.ndarray) -> None:
    """The usual recipe: a linear resize, then subtract and multiply in FP32, without a border."""
    small = cv2.resize(image, (plan.rule.width, plan.rule.height))
    planes = small[:, :, ::-1].transpose(2, 0, 1)
    np.subtract(planes, np.array([[[123.7]], [[116.3]], [[103.5]]], np.float32), out=row)
    np.multiply(row, np.array([[[1 / 58.4]], [[1 / 57.1]], [[1 / 57.4]]], np.float32), out=row)


def by_blob(plan: ImagePlan, image: np.ndarray) -> object:
    """OpenCV's own, which has one scale for all channels."""
    size = (plan.rule.width, plan.rule.height)
    return cv2.dnn.blobFromImage(image, 1 / 57.6, size, (103.5, 116.3, 123.7), swapRB=True)


def outside(rounds: int) -> None:
    image = frame(640, 480)
    for side, parameters in ((224, {"image_fit": "stretch"}), (640, {"image_fit": "letterbox"})):
        how = parameters["image_fit"]
        plan = plan_of({**parameters, **NORMALISED}, side, DType.FP32)
        linear = plan_of({**parameters, **NORMALISED, "image_interpolation": "linear"}, side, DType.FP32)
        row = np.empty(plan.item_shape, np.float32)
        calls: Calls = {
            "ours: OpenCV look-up of split channels": lambda p=plan, r=row: p.write(
                Picture(image, Color.BGR), r, model=""
            ),
            "one numpy look-up a channel": lambda p=plan, r=row: by_numpy_table(p, image, r),
        }
        if side == 224:
            calls |= {
                "ours, image_interpolation linear": lambda p=linear, r=row: p.write(
                    Picture(image, Color.BGR), r, model=""
                ),
                "linear resize + numpy arithmetic": lambda p=plan, r=row: by_arithmetic(p, image, r),
                "dnn.blobFromImage (linear, allocates)": lambda p=plan: by_blob(p, image),
            }
        compare(f"640x480 to {side} {how}, FP32 planar", calls, rounds)
        packed = plan_of({**parameters, **PLAIN}, side, DType.UINT8, is_packed=True)
        bytes_row = np.empty(packed.item_shape, np.uint8)
        compare(
            f"640x480 to {side} {how}, UINT8 packed",
            {
                "ours": lambda p=packed, r=bytes_row: p.write(Picture(image, Color.BGR), r, model=""),
                "one numpy look-up a channel": lambda p=packed, r=bytes_row: by_numpy_table(p, image, r),
            },
            rounds,
        )


# (b) Inside the graph.


def onnx_with_preprocessing() -> bytes:
    """The classifier with Cast, Transpose, Resize, Sub and Div put in front: BGR 8 bits, packed, of any size."""
    model = onnx.load(str(MODEL))
    opset = model.opset_import[0].version
    nodes = [
        helper.make_node("Gather", ["frame", "swap"], ["rgb"], axis=3),
        helper.make_node("Cast", ["rgb"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["floats"], ["planar"], perm=[0, 3, 1, 2]),
        helper.make_node("Resize", ["planar", "", "", "sizes"], ["small"], mode="linear"),
        helper.make_node("Sub", ["small", "mean"], ["centred"]),
        helper.make_node("Div", ["centred", "stddev"], ["input_made"]),
    ]
    constants = {
        "swap": np.array([2, 1, 0]),
        "sizes": np.array([1, 3, 224, 224]),
        "mean": np.array(127, np.float32),
        "stddev": np.array(128, np.float32),
    }
    front = helper.make_graph(
        nodes,
        "front",
        [helper.make_tensor_value_info("frame", TensorProto.UINT8, [1, None, None, 3])],
        [helper.make_tensor_value_info("input_made", TensorProto.FLOAT, [1, 3, 224, 224])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    before = helper.make_model(front, opset_imports=[helper.make_opsetid("", opset)], ir_version=model.ir_version)
    return compose.merge_models(before, model, [("input_made", model.graph.input[0].name)]).SerializeToString()


def openvino_with_preprocessing(core: openvino.Core) -> openvino.CompiledModel:
    model = core.read_model(str(MODEL))
    model.reshape([1, 3, 224, 224])
    processor = openvino.preprocess.PrePostProcessor(model)
    given = processor.input()
    given.tensor().set_element_type(openvino.Type.u8).set_layout(openvino.Layout("NHWC"))
    given.tensor().set_color_format(openvino.preprocess.ColorFormat.BGR).set_spatial_static_shape(480, 640)
    steps = given.preprocess()
    steps.convert_element_type(openvino.Type.f32).convert_color(openvino.preprocess.ColorFormat.RGB)
    steps.resize(openvino.preprocess.ResizeAlgorithm.RESIZE_LINEAR).mean(127.0).scale(128.0)
    given.model().set_layout(openvino.Layout("NCHW"))
    return core.compile_model(processor.build(), "CPU", OPENVINO_OPTIONS)


OPENVINO_OPTIONS = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}


def session_of(model: str | bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def graphs(rounds: int) -> None:
    image = frame(640, 480)
    normalised = {"image_scale": "1", "image_mean": "127", "image_stddev": "128"}
    plan = plan_of({"image_fit": "stretch", **normalised}, 224, DType.FP32)
    linear = plan_of({"image_fit": "stretch", "image_interpolation": "linear", **normalised}, 224, DType.FP32)
    batch = np.empty((1, 3, 224, 224), np.float32)
    outside_ort, inside_ort = session_of(str(MODEL)), session_of(onnx_with_preprocessing())
    core = openvino.Core()
    plain = core.read_model(str(MODEL))
    plain.reshape([1, 3, 224, 224])
    outside_ov = core.compile_model(plain, "CPU", OPENVINO_OPTIONS).create_infer_request()
    inside_ov = openvino_with_preprocessing(core).create_infer_request()

    def written(chosen: ImagePlan) -> np.ndarray:
        chosen.write(Picture(image, Color.BGR), batch[0], model="")
        return batch

    compare(
        "one 640x480 frame to classes, ONNX Runtime, 1 thread",
        {
            "ours outside, then the model": lambda: outside_ort.run(None, {"input": written(plan)}),
            "ours outside, linear": lambda: outside_ort.run(None, {"input": written(linear)}),
            "operations in front of the graph (linear)": lambda: inside_ort.run(None, {"frame": image[None]}),
            "the model alone": lambda: outside_ort.run(None, {"input": batch}),
        },
        rounds,
    )
    compare(
        "one 640x480 frame to classes, OpenVINO f32, 1 thread",
        {
            "ours outside, then the model": lambda: outside_ov.infer([written(plan)]),
            "ours outside, linear": lambda: outside_ov.infer([written(linear)]),
            "PrePostProcessor inside the graph (linear)": lambda: inside_ov.infer([image[None]]),
            "the model alone": lambda: outside_ov.infer([batch]),
        },
        rounds,
    )
    close = outside_ort.run(None, {"input": written(linear)})[0] - inside_ort.run(None, {"frame": image[None]})[0]
    print(f"  linear outside and inside differ by {np.abs(close).max():.1e} in a probability")


# (c) JPEG.


def jpegs(rounds: int) -> None:
    try:
        import simplejpeg
    except ImportError:
        simplejpeg = None
    for width, height in ((640, 480), (1280, 720)):
        data = cv2.imencode(".jpg", frame(width, height), [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes()
        sent = Frame(FrameHeader(), format="jpeg", data=data)
        plans = {
            name: plan_of({"image_fit": "stretch", "image_decode": name, **NORMALISED}, 224, DType.FP32)
            for name in ("exact", "fast")
        }
        row = np.empty((3, 224, 224), np.float32)

        def whole(plan: ImagePlan, sent: Frame = sent, row: np.ndarray = row) -> None:
            plan.write(plan.read_frame(sent, memoryview(sent.data), model=""), row, model="")

        calls: Calls = {"cv2.imdecode": lambda d=data: cv2.imdecode(np.frombuffer(d, np.uint8), cv2.IMREAD_COLOR)}
        if simplejpeg is not None:
            calls["simplejpeg"] = lambda d=data: simplejpeg.decode_jpeg(d, "BGR")
        calls |= {f"JPEG to 224 FP32, image_decode {name}": lambda p=plan: whole(p) for name, plan in plans.items()}
        compare(f"JPEG of {width}x{height}, {len(data) // 1000} KB", calls, rounds)
        whole(plans["exact"])
        exact = row.copy()
        whole(plans["fast"])
        apart = np.abs(row - exact) * 57.6
        print(f"  exact and fast differ by {apart.mean():.2f} of 255 in the mean, {apart.max():.0f} at the most")


# (d) OpenCV's threads beside a model.


def threads() -> None:
    """Two workers prepare 1280x720 frames as fast as they can while a model runs on all cores."""
    print("\n1280x720 to 640 letterbox, FP32, in 2 workers beside ONNX Runtime on all cores")
    plan = plan_of({"image_fit": "letterbox", **NORMALISED}, 640, DType.FP32)
    picture = Picture(frame(1280, 720), Color.BGR)
    session = onnxruntime.InferenceSession(str(MODEL), providers=["CPUExecutionProvider"])
    batch = np.zeros((1, 3, 224, 224), np.float32)
    counts: dict[int, list[tuple[float, float, float]]] = {1: [], 0: []}
    for _ in range(4):
        for setting in counts:
            cv2.setNumThreads(setting or -1)
            counts[setting].append(_beside(plan, picture, lambda: session.run(None, {"input": batch})))
    cv2.setNumThreads(1)
    for setting, results in counts.items():
        pictures, runs, p99 = (statistics.median(column) for column in zip(*results, strict=True))
        name = "cv2.setNumThreads(1)" if setting else "OpenCV's own number"
        print(f"  {pictures:5.0f} pictures/s  {runs:4.0f} inferences/s  picture p99 {p99:5.1f} ms  {name}")


def _beside(plan: ImagePlan, picture: Picture, infer: Callable[[], object]) -> tuple[float, float, float]:
    stop, spans, runs = threading.Event(), [], []

    def prepare() -> None:
        row = np.empty(plan.item_shape, np.float32)
        while not stop.is_set():
            start = time.perf_counter()
            plan.write(picture, row, model="")
            spans.append(time.perf_counter() - start)

    def run() -> None:
        while not stop.is_set():
            infer()
            runs.append(1)

    workers = [threading.Thread(target=target) for target in (prepare, prepare, run)]
    for worker in workers:
        worker.start()
    time.sleep(1.5)
    stop.set()
    for worker in workers:
        worker.join()
    return len(spans) / 1.5, len(runs) / 1.5, 1e3 * sorted(spans)[int(len(spans) * 0.99)]


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    # As the server does: without it big arrays pay for page faults each time.
    keep_big_blocks()
    print(f"OpenCV {cv2.__version__}, ONNX Runtime {onnxruntime.__version__}, OpenVINO {openvino.__version__}")
    cv2.setNumThreads(1)
    outside(rounds)
    graphs(rounds)
    jpegs(rounds)
    threads()


if __name__ == "__main__":
    main()
