"""Checks of the runtimes: finds each one's version or the reason why it does not work, and the fastest one for a sample
model."""

from __future__ import annotations

import importlib.metadata
import json
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from edge_server.backends import backend_names
from edge_server.child_command import child_command
from edge_server.core.finding import Finding, FindingLevel
from edge_server.errors import install_hint

_SECTION = "runtimes"
_TIMEOUT_S = 120.0
"""Longest time to import one runtime and to run the sample; TensorRT builds an engine first."""

_WITHOUT_LIBRARY = ("c_abi", "ensemble", "identity", "python", "repeat", "square", "stub")
_ALIASES = ("fil", "tflite")
DISTRIBUTIONS = {
    "forest": "treelite",
    "litert": "ai-edge-litert",
    "llama_cpp": "xllamacpp",
    "onnxruntime": "onnxruntime",
    "openvino": "openvino",
    "openvino_embeddings": "openvino-genai",
    "openvino_rerank": "openvino-genai",
    "openvino_genai": "openvino-genai",
    "pytorch": "torch",
    "tensorrt": "tensorrt",
}
"""Backend -> the distribution whose version is shown if the backend does not report one."""

Probe = Callable[[str], Mapping[str, Any]]


def check_runtimes(packages: Mapping[str, str], *, is_jetson: bool, probe: Probe | None = None) -> Iterator[Finding]:
    """Try each runtime. `packages` are NVIDIA's installed system packages."""
    probe = probe or run_probe
    names = [name for name in backend_names() if name not in (*_WITHOUT_LIBRARY, *_ALIASES)]
    found = {name: probe(name) for name in sorted(names)}
    absent: dict[str, str] = {}
    for name, answer in found.items():
        extra = _missing_extra(answer)
        if extra and not (name == "tensorrt" and is_jetson):
            absent[name] = extra
        else:
            yield _finding(name, answer, packages, is_jetson=is_jetson)
    if absent:
        extras = ", ".join(sorted(set(absent.values())))
        advice = f"{install_hint('EXTRA')}; EXTRA is one of the extras {extras}"
        yield Finding(_SECTION, "not installed", ", ".join(absent), FindingLevel.NOTE, advice)
    yield from _same_files_twice()
    works = [name for name, answer in found.items() if "problem" not in answer]
    if not works:
        text = "no runtime works: only models in Python and the built-in ones can be served"
        yield Finding(_SECTION, "all", text, FindingLevel.PROBLEM, install_hint("cpu"))
    timed = {name: float(answer["ms"]) for name, answer in found.items() if "ms" in answer}
    if timed:
        best = min(timed, key=lambda name: timed[name])
        told = ", ".join(f"{name} {ms:.1f} ms" for name, ms in sorted(timed.items(), key=lambda item: item[1]))
        yield Finding(_SECTION, "fastest", f"{best}: a small convolutional net, FP32, one picture at a time: {told}")


def _missing_extra(answer: Mapping[str, Any]) -> str:
    """Return the extra that installs a runtime whose library is absent; "" if it works or fails for another reason."""
    why = str(answer.get("problem", ""))
    if answer.get("is_broken") or ("ModuleNotFoundError" not in why and "is not installed" not in why):
        return ""
    return why.partition("; install the extra ")[2].partition(":")[0]


def _same_files_twice() -> Iterator[Finding]:
    """Warn about several distributions of ONNX Runtime: they share one folder and overwrite each other's files."""
    found = sorted({name.lower() for name in importlib.metadata.packages_distributions().get("onnxruntime", ())})
    if len(found) > 1:
        text = f"{' and '.join(found)} are installed, and overwrite each other's files"
        advice = (
            f"pip uninstall {' '.join(found)}, then {install_hint('cpu')}; on x86-64 with an NVIDIA card the extra gpu"
        )
        yield Finding(_SECTION, "onnxruntime", text, FindingLevel.WARNING, advice)


def run_probe(name: str) -> Mapping[str, Any]:
    """Try one runtime in its own process. The result has a "problem" if the process crashes or does not end."""
    command = child_command("edge_server.plugins.doctor.probe_runtime", name)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"problem": f"it did not end within {_TIMEOUT_S:g} s", "is_broken": True}
    if done.returncode < 0:
        ended = signal.Signals(-done.returncode).name
        return {"problem": f"it ended its process with {ended}", "is_broken": True}
    try:
        answer: Mapping[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        return {"problem": f"the trial ended with {done.returncode}: {last[0]}", "is_broken": True}
    return answer


def _finding(name: str, answer: Mapping[str, Any], packages: Mapping[str, str], *, is_jetson: bool) -> Finding:
    if "problem" in answer:
        return _missing(name, answer, packages, is_jetson=is_jetson)
    if "ms" in answer:
        text = f"{answer['runtime']} on {answer['device']}, {answer['precision']}"
        return Finding(_SECTION, name, text)
    if "sample_problem" in answer:
        text = f"{_version(name)}, but it does not run the sample model: {answer['sample_problem']}"
        return Finding(
            _SECTION, name, text, FindingLevel.WARNING, "edge-server check on a model of your own shows more"
        )
    return Finding(_SECTION, name, _version(name))


def _missing(name: str, answer: Mapping[str, Any], packages: Mapping[str, str], *, is_jetson: bool) -> Finding:
    why = str(answer["problem"])
    if answer.get("is_broken"):
        advice = "it was built for another processor or another library: install the version of the hardware's maker"
        return Finding(_SECTION, name, f"does not work: {why}", FindingLevel.WARNING, advice)
    if name == "tensorrt" and is_jetson:
        version = packages.get("python3-libnvinfer")
        if version:
            advice = (
                f"TensorRT {version} is installed, and this Python does not see it: make the environment with "
                "/usr/bin/python3 -m venv --system-site-packages, as jetson/install.sh does"
            )
        else:
            advice = "sudo apt-get install python3-libnvinfer"
        return Finding(_SECTION, name, f"not available: {why}", FindingLevel.WARNING, advice)
    return Finding(_SECTION, name, f"not available: {why}", FindingLevel.NOTE)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(DISTRIBUTIONS[name])
    except (importlib.metadata.PackageNotFoundError, KeyError):
        return "works"
