"""`edge-server add FILE`: put a model file into a repository, with a configuration, and try it."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from edge_server.cli.console import busy_line, clean, render
from edge_server.config import ServerConfig
from edge_server.config.merge_settings import parse_serve
from edge_server.config.setting_sources import process_environment
from edge_server.core.exit_code import ExitCode
from edge_server.core.model_spec import InputSpec, ModelSpec
from edge_server.core.tensor import DType
from edge_server.errors import InvalidRequest, LoadError
from edge_server.plugin import own_plugins
from edge_server.plugins.add.new_model import (
    NewModelFiles,
    check_is_free,
    check_name,
    copy_files,
    find_source,
    move_into_place,
    staging_folder,
)
from edge_server.plugins.add.proposal import PictureFinding, PictureTrial, Proposal, propose
from edge_server.plugins.add.trial import RuntimeTrial, try_runtimes
from edge_server.plugins.add.written_config import describe_tensor, write_config
from edge_server.plugins.vision.demo_picture import PICTURE
from edge_server.plugins.vision.perception import Perception
from edge_server.repository.resolve_version import ResolveOptions, resolve
from edge_server.repository.scan import Scanner

_DEFAULT_REPOSITORY = Path("model_repository")
_WIDTH = 80
_MAX_SHOWN = 5
"""Maximum number of detections, classes and labels that are printed."""
_MAX_INLINE_ELEMENTS = 16
"""Maximum number of elements of an input that are written out in a curl command."""


def run(arguments: Sequence[str]) -> int:
    """Add the model and print what was found. Return 0, or 1 if no runtime runs it. Raises EdgeServerError."""
    options = _parser().parse_args(arguments)
    config = parse_serve(["--print-config"], process_environment(), own_plugins()).config
    repository = options.model_repository or _configured_repository(config)
    source = find_source(options.file)
    name = options.name or source.name
    check_name(name)
    check_is_free(repository, name)
    if not options.picture.is_file():
        raise InvalidRequest(f"--picture={options.picture}: there is no such file")
    with staging_folder(repository) as staging, tempfile.TemporaryDirectory(prefix="edge-add-") as scratch:
        folder = copy_files(source, staging / name)
        model = _Model(folder, source, options.picture)
        with busy_line(f"trying {name}"):
            trials = model.try_it(config.backends, Path(scratch))
        chosen = model.choose()
        others = [(proposal, _verdict(finding)) for proposal, finding in model.findings if proposal is not chosen]
        write_config(folder, model.spec, source.backend, chosen, others, _remarks(source, trials))
        _resolve(folder)  # what was written must load
        target = move_into_place(folder, repository)
    _say(f"wrote {target}")
    _print_next_steps(model.spec, chosen, repository)
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="edge-server add",
        description="Put a model into a repository: look into the file, say what it is, write a commented "
        "config.pbtxt, try it on a picture and on noise, and measure each installed runtime. A running server that "
        "watches the repository serves it at once.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="model file that a runtime reads, or the folder of an export"
    )
    parser.add_argument("--name", default="", help="name of the model (default: that of the file)")
    parser.add_argument(
        "--model-repository", type=Path, metavar="DIR",
        help="repository to add it to (default: the configured one, else model_repository here)",
    )  # fmt: skip
    parser.add_argument(
        "--picture", type=Path, default=PICTURE, metavar="FILE",
        help="picture to try it on, of something that it detects (default: a portrait)",
    )  # fmt: skip
    return parser


def _configured_repository(config: ServerConfig) -> Path:
    return next((Path(path) for path in config.repository.paths if "://" not in path), _DEFAULT_REPOSITORY)


def _resolve(folder: Path) -> tuple[ModelSpec, Mapping[str, str]]:
    """Return the specification of the model in a folder, and the metadata of its file. Raises LoadError."""
    found: dict[str, str] = {}

    def keep_metadata(spec: ModelSpec, metadata: Mapping[str, str]) -> None:
        found.update(metadata)

    model = Scanner([folder.parent]).find(folder.name)
    if model is None:
        raise LoadError(f"'{folder}' disappeared")
    return resolve(model, 1, ResolveOptions(recognisers=(keep_metadata,))).spec, found


class _Model:
    """A new model in its staging folder, and what was found about it."""

    def __init__(self, folder: Path, source: NewModelFiles, picture: Path) -> None:
        """Look into the file, and print what it says. Raises LoadError."""
        self.spec, metadata = _resolve(folder)
        self.findings: list[tuple[Proposal, PictureFinding | None]] = []
        self._folder = folder
        self._picture = picture
        _say(f"{source.path.name}: {source.size_bytes / 1e6:.1f} MB, opened by {self.spec.backend}")
        if self.spec.is_decoupled:
            _say("kind    a language model")
        else:
            for title, tensors in (("input", self.spec.inputs), ("output", self.spec.outputs)):
                for tensor in tensors:
                    _say(f"{title:8}{describe_tensor(tensor, self.spec.max_batch_size)}", indent=8)
        self._proposals, note = propose(self.spec, metadata)
        if note:
            _say(note)

    def try_it(self, settings: Mapping[str, Mapping[str, str]], scratch: Path) -> list[RuntimeTrial]:
        """Run it with each runtime, test the proposals, and print the results. Raises LoadError if nothing opens it."""
        if self.spec.is_decoupled:
            return []
        tests = [PictureTrial(self.spec, proposal, self._picture) for proposal in self._proposals]
        samples = [sample for test in tests for sample in test.samples]
        try:
            trials = try_runtimes(self._folder.parent, self._folder.name, self.spec.backend, samples, settings, scratch)
        except InvalidRequest as error:
            _say(f"not tried: {error.message}")
            trials = []
        outputs = next((iter(trial.outputs) for trial in trials if trial.outputs), None)
        for test in tests:
            finding = test.evaluate((next(outputs), next(outputs))) if outputs is not None and test.samples else None
            self.findings.append((test.proposal, finding))
            _print_finding(test.proposal, finding)
        _print_trials(trials)
        return trials

    def choose(self) -> Proposal | None:
        """Return the proposal to use; None if there is none, or it is not decided."""
        certain = [proposal for proposal, _ in self.findings if proposal.is_certain]
        return certain[0] if len(certain) == 1 else None


def _print_finding(proposal: Proposal, finding: PictureFinding | None) -> None:
    _say(f"kind    {proposal.title}: {proposal.evidence}", indent=8)
    for labels in proposal.labels.values():
        rest = f" ... {len(labels)} in all" if len(labels) > _MAX_SHOWN else ""
        _say(f"labels  {', '.join(labels[:_MAX_SHOWN])}{rest}", indent=8)
    if finding is None:
        return
    _say(f"picture {_describe(finding.picture)}", indent=8)
    count = len(finding.noise.detections)
    if finding.picture.detections or count:
        best = f", the best {max(item.score for item in finding.noise.detections):.2f}" if count else ""
        _say(f"noise   {count} detections{best}", indent=8)
    for problem in finding.problems:
        _say(f"problem {problem}", indent=8)


def _describe(seen: Perception) -> str:
    """Return what was seen, the best first."""
    found = [
        f"{item.label or item.class_index} {item.score:.2f} at {item.x_min:.0f},{item.y_min:.0f} to "
        f"{item.x_max:.0f},{item.y_max:.0f}"
        for item in seen.detections
    ]
    found += [f"{item.label or item.index} {item.score:.2f}" for item in seen.classes]
    if seen.mask is not None:
        found.append(f"a mask of {seen.mask.width}x{seen.mask.height}")
    rest = f" and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
    return "; ".join(found[:_MAX_SHOWN]) + rest if found else "nothing"


def _verdict(finding: PictureFinding | None) -> str:
    if finding is None:
        return "not tried"
    return "; ".join(finding.problems) or f"on the picture {_describe(finding.picture)}"


def _print_trials(trials: Sequence[RuntimeTrial]) -> None:
    rows = [
        (item.runtime, item.device, item.precision, f"{item.load_ms:.0f}", f"{statistics.median(item.times_ms):.3g}")
        for item in trials
        if item.times_ms
    ]
    if rows:
        print()
        print(render(("RUNTIME", "DEVICE", "PRECISION", "LOAD MS", "RUN MS"), rows, sys.stdout))
        print()
    for item in trials:
        if item.reason:
            _say(f"{item.backend}: {item.reason}")


def _remarks(source: NewModelFiles, trials: Sequence[RuntimeTrial]) -> list[str]:
    lines = [
        f"Written by `edge-server add {source.path.name}` on {time.strftime('%Y-%m-%d')}. Change it as you like: a "
        "server that watches the repository loads it again."
    ]
    measured = [(statistics.median(item.times_ms), item) for item in trials if item.times_ms]
    lines += [f"  {item.runtime}, {item.precision}: {median:.3g} ms for one run here" for median, item in measured]
    return lines


def _print_next_steps(spec: ModelSpec, chosen: Proposal | None, repository: Path) -> None:
    print(f"\nServe it:\n  edge-server serve --model-repository={shlex.quote(str(repository))}")
    url = "http://127.0.0.1:8000"
    name = shlex.quote(spec.name)
    if chosen is not None:
        print(f"Ask it:\n  curl --data-binary @picture.jpg {url}/edge/v1/models/{name}/perception")
    elif spec.is_decoupled:
        print(f"Talk to it:\n  edge-server chat {name}")
    else:
        print(f"Ask it:\n  {_curl(spec, f'{url}/v2/models/{name}/infer')}")


def _curl(spec: ModelSpec, url: str) -> str:
    """Return a command that sends zeros, or empty texts, with free dimensions of 1."""
    inputs, is_short = [], True
    for item in spec.inputs:
        if item.is_optional:
            continue
        shape = [*((1,) if spec.max_batch_size > 0 else ()), *(abs(dim) for dim in item.dims)]
        count = math.prod(shape)
        is_short &= count <= _MAX_INLINE_ELEMENTS
        inputs.append({"name": item.name, "datatype": item.dtype.value, "shape": shape, "data": (_zero(item), count)})
    if is_short:
        body = json.dumps({"inputs": [{**item, "data": [item["data"][0]] * item["data"][1]} for item in inputs]})
        return f"curl {url} --data {shlex.quote(body)}"
    texts = ", ".join(
        json.dumps({**item, "data": None})[:-5] + f"[{json.dumps(item['data'][0])}] * {item['data'][1]}}}"
        for item in inputs
    )
    program = f'import json; print(json.dumps({{"inputs": [{texts}]}}))'
    return f"python3 -c {shlex.quote(program)} |\n  curl {url} --data @-"


def _zero(item: InputSpec) -> object:
    return {DType.BYTES: "", DType.BOOL: False}.get(item.dtype, 0)


def _say(text: str, indent: int = 2) -> None:
    """Print a line, wrapped to 80 columns."""
    print("\n".join(textwrap.wrap(clean(text), _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)))
