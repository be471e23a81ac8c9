"""From a model's folder to its first right answer: `python tests/bench/folder_to_answer.py [--rounds N] [--ways A,B]`.

A model is put into the repository of a running server, and is asked every few milliseconds over HTTP until it answers
what the bare runtime, or the formula of its `model.py`, gives. Printed are the seconds from the first step of putting
it there, and the server's processor seconds meanwhile, the failed questions included: medians of the rounds, with the
least and the greatest. The model is put there as

    folder moved    by a rename, as `mv` does on one file system
    folder copied   file by file, as `cp -r` does
    file moved      into its version's folder, which has been there with its configuration for some time

Ways: `here` follows its repository, the default; `poll15` and `poll1` are Triton in its mode `poll`, by default every
15 s, and every second; `explicit_here` and `explicit` are both with a load request after the model is there. The model
comes at a random moment of Triton's period. Triton needs EDGE_BENCH_TRITON; EDGE_BENCH_TRITON_PYTHON for the Python
model; and for the others the backend `onnxruntime` in EDGE_BENCH_TRITON_BACKENDS, see harness.py. What is missing is
left out. The YOLO is the file that EDGE_TEST_YOLO_EXPORT names.
"""

from __future__ import annotations

import argparse
import contextlib
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
PUTS = ("folder moved", "folder copied", "file moved")
HERE = {"here": (), "explicit_here": ("--model-control-mode=explicit",)}
TRITON = {
    "poll15": ("--model-control-mode=poll",),
    "poll1": ("--model-control-mode=poll", "--repository-poll-secs=1"),
    "explicit": ("--model-control-mode=explicit",),
}
"""Way -> flags of its server."""
PERIODS_S = {"poll15": 15.0, "poll1": 1.0}


@dataclass(frozen=True)
class Model:
    """`inputs` have the `answers`."""

    config: str
    files: dict[str, bytes]
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
    return Model(ONNX, {"model.onnx": data}, inputs, answers, True)


def models() -> dict[str, Model]:
    first, second = np.arange(16, dtype=np.float32), np.ones(16, np.float32)
    answers = {"OUTPUT0": first + second, "OUTPUT1": first - second}
    made = {
        "tiny ONNX": onnx_model(cases.add_sub()),
        "MobileNetV2": onnx_model(networks.mobilenet_v2().SerializeToString()),
        "Python": Model(*cases.python_model("add_sub_python"), {"INPUT0": first, "INPUT1": second}, answers, False),
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
    way: str, put: str, model: Model, name: str, where: harness.Server, repository: Path
) -> tuple[float, float]:
    """Return the seconds until the first right answer, and the server's processor seconds meanwhile."""
    with (
        tempfile.TemporaryDirectory(dir=repository.parent) as staging,
        contextlib.contextmanager(question)(model, name, where) as is_right,
    ):
        folder = harness.write_model(Path(staging), name, model.config, model.files)
        if put == "file moved":
            harness.write_model(repository, name, model.config)
            time.sleep(2)  # both servers have seen it, or will at the moment that is measured
        assert not is_right()
        time.sleep(random.uniform(0, PERIODS_S.get(way, 0)))
        begun_s, begun_cpu_s = time.monotonic(), where.cpu_s()
        if put == "folder moved":
            folder.rename(repository / name)
        elif put == "folder copied":
            shutil.copytree(folder, repository / name)
        else:
            for file in model.files:
                (folder / "1" / file).rename(repository / name / "1" / file)
        if way.startswith("explicit"):
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
    parser.add_argument("--ways", default=",".join([*HERE, *(TRITON if harness.TRITON else ())]))
    given = parser.parse_args()
    ways = given.ways.split(",")
    if unknown := set(ways) - {*HERE, *TRITON}:
        parser.error(f"no ways are called {', '.join(sorted(unknown))}")
    has_backend = bool(harness.TRITON_BACKENDS) and (Path(harness.TRITON_BACKENDS) / "onnxruntime").is_dir()
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as top, contextlib.ExitStack() as stack:
        servers = {}
        for way in ways:
            repository = Path(top) / way
            repository.mkdir()
            running = (
                harness.triton(repository, TRITON[way])
                if way in TRITON
                else harness.server(repository, "--log-info=false", *HERE[way])
            )
            servers[way] = stack.enter_context(running), repository
        made = models()
        for number in range(given.rounds):
            for kind, model in made.items():
                for put in PUTS:
                    for way, (where, repository) in servers.items():
                        if way in TRITON and model.needs_backend and not has_backend:
                            continue
                        if way in PERIODS_S and put == "file moved" and not model.needs_backend:
                            # Triton 2.51 waits for ever for the process of a model whose model.py it did not find.
                            continue
                        name = f"{kind} {put} {number}".replace(" ", "_")
                        took = put_and_ask(way, put, model, name, where, repository)
                        found.setdefault((kind, put, way), []).append(took)
                        print(kind, put, way, *(f"{value:.3f}" for value in took), file=sys.stderr, flush=True)
    rows = [
        [*key, spread([seconds for seconds, _ in values]), spread([cpu for _, cpu in values])]
        for key, values in found.items()
    ]
    print(harness.markdown(["model", "put there as", "way", "seconds", "processor seconds"], rows))


if __name__ == "__main__":
    main()
