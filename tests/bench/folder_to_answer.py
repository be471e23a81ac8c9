"""From a model's folder to its first right answer: `python tests/bench/folder_to_answer.py [--rounds N] [--ways A,B]`.

A folder is put into the repository of a running server, and the model is asked every few milliseconds over HTTP until
it answers what the bare runtime, or the formula of its `model.py`, gives. Printed are the seconds from the first step
of putting it there, and the server's processor seconds meanwhile, the failed questions included: medians of the rounds,
with the least and the greatest. The folder is put there

    moved       by a rename, as `mv` does on one file system
    copied      file by file, as `cp -r` does

Ways: `here` follows its repository, the default; `poll15` and `poll1` are Triton in its mode `poll`, by default every
15 s, and every second; `explicit` is Triton with a load request after the folder is there. The move comes at a random
moment of Triton's period. Triton needs EDGE_BENCH_TRITON; EDGE_BENCH_TRITON_PYTHON for the Python model; and for the
others the backend `onnxruntime` in EDGE_BENCH_TRITON_BACKENDS, see harness.py. What is missing is left out. The YOLO is
the file that EDGE_TEST_YOLO_EXPORT names.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import cases
import harness
import networks
import numpy as np
import onnxruntime
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

ASK_EVERY_S = 0.005
GIVEN_UP_S = 120.0
ONNX = 'backend: "onnxruntime"\ninstance_group { count: 1 kind: KIND_CPU }\n'
TRITON_FLAGS = {
    "poll15": ("--model-control-mode=poll",),
    "poll1": ("--model-control-mode=poll", "--repository-poll-secs=1"),
    "explicit": ("--model-control-mode=explicit",),
}
PERIODS_S = {"poll15": 15.0, "poll1": 1.0}
WAYS = ("here", *TRITON_FLAGS)


@dataclass(frozen=True)
class Model:
    """`write` makes the folder of a name in a repository; `inputs` have the `answers`."""

    write: Callable[[Path, str], Path]
    inputs: dict[str, np.ndarray]
    answers: dict[str, np.ndarray]
    needs_backend: bool


def onnx_model(data: bytes) -> Model:
    """Return a model of an ONNX file; an open size is a batch of 1, or the edge of a picture."""
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    inputs = {
        declared.name: np.random.default_rng(0)
        .random([size if isinstance(size, int) else 320 if axis else 1 for axis, size in enumerate(declared.shape)])
        .astype(np.float32)
        for declared in session.get_inputs()
    }
    names = [declared.name for declared in session.get_outputs()]
    answers = dict(zip(names, session.run(names, inputs), strict=True))
    return Model(
        lambda folder, name: harness.write_model(folder, name, ONNX, {"model.onnx": data}), inputs, answers, True
    )


def models() -> dict[str, Model]:
    def write_python(folder: Path, name: str) -> Path:
        cases.write_python_models(folder)
        made = (folder / "add_sub_python").rename(folder / name)
        config = made / "config.pbtxt"
        config.write_text(config.read_text().replace('"add_sub_python"', f'"{name}"'))
        return made

    first, second = np.arange(16, dtype=np.float32), np.ones(16, np.float32)
    answers = {"OUTPUT0": first + second, "OUTPUT1": first - second}
    made = {
        "tiny ONNX": onnx_model(cases.add_sub()),
        "MobileNetV2": onnx_model(networks.mobilenet_v2().SerializeToString()),
        "Python": Model(write_python, {"INPUT0": first, "INPUT1": second}, answers, False),
    }
    if yolo := os.environ.get("EDGE_TEST_YOLO_EXPORT"):
        made["YOLO"] = onnx_model(Path(yolo).read_bytes())
    return made


def question(model: Model, name: str, where: harness.Server) -> Iterator[Callable[[], bool]]:
    """Yield what asks the model once, and returns whether the answer is right."""
    inputs = []
    for tensor, values in model.inputs.items():
        inputs.append(triton_http.InferInput(tensor, list(values.shape), "FP32"))
        inputs[-1].set_data_from_numpy(values)

    def is_right() -> bool:
        try:
            found = client.infer(name, inputs)
        except InferenceServerException:
            return False
        for output, values in model.answers.items():
            if not np.allclose(found.as_numpy(output), values, rtol=1e-3, atol=1e-3):
                raise SystemExit(f"{name} answers {output} wrongly")
        return True

    with contextlib.closing(triton_http.InferenceServerClient(where.http)) as client:
        yield is_right


def put_and_ask(
    way: str, is_moved: bool, model: Model, name: str, where: harness.Server, repository: Path
) -> tuple[float, float]:
    """Return the seconds until the first right answer, and the server's processor seconds meanwhile."""
    with (
        tempfile.TemporaryDirectory(dir=repository.parent) as staging,
        contextlib.contextmanager(question)(model, name, where) as is_right,
    ):
        folder = model.write(Path(staging), name)
        assert not is_right()
        time.sleep(random.uniform(0, PERIODS_S.get(way, 0)))
        begun_s, begun_cpu_s = time.monotonic(), where.cpu_s()
        if is_moved:
            folder.rename(repository / name)
        else:
            shutil.copytree(folder, repository / name)
        if way == "explicit":
            where.post(f"/v2/repository/models/{name}/load", {})
        while not is_right():
            if time.monotonic() - begun_s > GIVEN_UP_S:
                raise SystemExit(f"{name} is not served after {GIVEN_UP_S:.0f} s: {way}")
            time.sleep(ASK_EVERY_S)
        return time.monotonic() - begun_s, where.cpu_s() - begun_cpu_s


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", default=",".join(WAYS if harness.TRITON else WAYS[:1]))
    given = parser.parse_args()
    ways = given.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"no ways are called {', '.join(sorted(unknown))}")
    has_backend = bool(harness.TRITON_BACKENDS) and (Path(harness.TRITON_BACKENDS) / "onnxruntime").is_dir()
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as top, contextlib.ExitStack() as stack:
        servers = {}
        for way in ways:
            repository = Path(top) / way
            repository.mkdir()
            start = functools.partial(harness.triton, flags=TRITON_FLAGS[way]) if way in TRITON_FLAGS else here
            servers[way] = stack.enter_context(start(repository)), repository
        made = models()
        for number in range(given.rounds):
            for kind, model in made.items():
                for put in ("moved", "copied"):
                    for way, (where, repository) in servers.items():
                        if way == "here" or has_backend or not model.needs_backend:
                            name = f"{kind.replace(' ', '_')}_{put}_{number}"
                            took = put_and_ask(way, put == "moved", model, name, where, repository)
                            found.setdefault((kind, put, way), []).append(took)
                            print(kind, put, way, *(f"{value:.3f}" for value in took), file=sys.stderr, flush=True)
    rows = [
        [*key, spread([seconds for seconds, _ in values]), spread([cpu for _, cpu in values])]
        for key, values in found.items()
    ]
    print(harness.markdown(["model", "folder", "server", "seconds", "processor seconds"], rows))


def here(repository: Path) -> contextlib.AbstractContextManager[harness.Server]:
    return harness.server(repository, "--log-info=false")


if __name__ == "__main__":
    main()
