"""Text of a new model's config.pbtxt: what was found, each key with its meaning, and what is not decided as
comments."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from edge_server.config.model_parameters import settings_of
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec, Recognised
from edge_server.errors import ServingFault
from edge_server.plugins.add.new_model import LABELS
from edge_server.plugins.add.picture_trial import Reading
from edge_server.plugins.vision.image_parameters import Declaration
from edge_server.plugins.vision.layout_recognition import UNDECIDED
from edge_server.plugins.vision.outputs.output_parameters import DECLARATIONS, HeadKind
from edge_server.repository.model_config.pbtxt import parse_text

_WIDTH = 100
_DECLARED = {key: item for declared in (Declaration, *DECLARATIONS) for key, item in settings_of(declared).items()}
POLICY = "policy_action_key"
"""Parameter that makes a model a robot's policy."""
_OFTEN_CHANGED = {"detection_score_threshold": "0.25", "track": "bytetrack"}
"""Parameters of a detector that are written as comments, with a value."""


def write_config(
    folder: Path,
    spec: ModelSpec,
    backend: str,
    chosen: Reading | None,
    readings: Sequence[Reading],
    remarks: Sequence[str],
    recognisers: Sequence[str] = (),
    *,
    recognised: Recognised | None = None,
    is_unbatched: bool = False,
    batch_size: int = 0,
) -> None:
    """Write config.pbtxt, and the labels of the chosen layout or of the likeliest one, into the folder of a new model.

    `backend` is empty if the files decide it. The other `readings` are written as comments. `remarks` come first.
    `recognisers` may read the lines of a text detector. `recognised` is what a server reads from the file of a model
    without readings. `is_unbatched`: no batches, though the file seems to batch. `batch_size` 0: as the server chooses.
    Raises OSError.
    """
    parameters = chosen.match.parameters if chosen is not None else {}
    lines = [*_comments(remarks), *_comments(["The file says the rest, which therefore is not repeated here:"])]
    for kind, tensors in (("input", spec.inputs), ("output", spec.outputs)):
        lines += _comments(f"  {kind} {describe_tensor(item, spec)}" for item in tensors)
    lines += ["", f"backend: {_quoted(backend)}"] if backend else []
    if is_unbatched:
        reason = "The rows of all pictures of a batch are in one list, and nothing says whose they are: no batches."
        lines += ["", *_comments([reason]), *unbatched_lines(spec)]
    if batch_size:
        lines += ["", *_comments([f"Most rows of a request. Without this line it is {spec.max_batch_size}."])]
        lines += [f"max_batch_size: {batch_size}"]
    if chosen is not None:
        lines += _chosen_lines(folder, spec, chosen, recognisers)
    if recognised is not None:
        parameters = recognised.parameters
        lines += ["", *_comments([f"{recognised.note}."]), *_parameters(parameters)]
        if POLICY in parameters:
            lines += _comments(["Fill in the milliseconds between two actions, and remove the '# ' before the line:"])
            lines += [f"# {parameter_line('policy_dt_ms', '')}"]
    others = [reading for reading in readings if reading is not chosen and reading.is_shown]
    if others and chosen is None:
        parameters = {"preprocessing": UNDECIDED}
    lines += _candidate_lines(folder, spec, others, is_decided=chosen is not None)
    text = "\n".join(lines) + "\n"
    given = {key: value.string_value for key, value in parse_text(text.encode(), spec.name).parameters.items()}
    if given != dict(parameters):
        raise ServingFault(f"model '{spec.name}': the configuration does not survive being written as text")
    (folder / "config.pbtxt").write_text(text, "utf-8")


def _chosen_lines(folder: Path, spec: ModelSpec, chosen: Reading, recognisers: Sequence[str]) -> Iterator[str]:
    """Write the labels of the chosen layout, and yield its evidence, its parameters, and those that are often
    changed."""
    parameters = chosen.match.parameters
    yield from ("", *_comments([f"{chosen.title}: {chosen.match.evidence}."]))
    if not chosen.match.is_certain:
        yield from _comments([f"Tried: {chosen.describe()}."])
    yield from _comments(f"Not proven: {doubt}." for doubt in chosen.match.doubts)
    yield from (*_parameters(parameters), *_labels(folder, spec, chosen))
    if chosen.lacks_class_names:
        yield from ("", *_label_comments(spec))
    if "detection_head" in parameters:
        is_text = parameters["detection_head"] == HeadKind.DBNET.value
        text_model = recognisers[0] if len(recognisers) == 1 else "NAME"
        usual = {"detection_text_model": text_model} if is_text else _OFTEN_CHANGED
        more = {key: text for key, text in usual.items() if key not in parameters}
        if more:
            yield from ("", "# Often changed:")
            yield from (line if line.startswith("#") else f"# {line}" for line in _parameters(more))


def _candidate_lines(folder: Path, spec: ModelSpec, others: Sequence[Reading], *, is_decided: bool) -> Iterator[str]:
    """Yield the layouts that were not chosen as comments. If none was, write the labels of the likeliest one, and yield
    the parameter that says so."""
    if not others:
        return
    if is_decided:
        also = " one that sees as much may be right, too." if any(reading.score for reading in others) else ""
        yield from ("", *_comments([f"Not chosen:{also}"]))
    else:
        yield from ("", *_comments(["Has `check` and `status` name the model until one of the candidates is stated."]))
        yield from (*_parameters({"preprocessing": UNDECIDED}), "")
        yield from _comments(["NOT DECIDED. Remove the '# ' before the parameters of one of these:"])
    for number, reading in enumerate(others, 1):
        yield from ("#", *_comments([f"{number}. {reading.title}: {reading.describe()}"]))
        if reading.is_usual:
            yield from _comments(f"  Not proven: {doubt}." for doubt in reading.match.doubts)
        yield from (f"# {parameter_line(key, text)}" for key, text in reading.match.parameters.items())
    if is_decided:
        return
    named = next((reading for reading in others if reading.match.labels), None)
    if named is not None:
        yield from (line if line.startswith("#") else f"# {line}".rstrip() for line in _labels(folder, spec, named))
    else:
        yield from ("#", *_label_comments(spec))


def unbatched_lines(spec: ModelSpec) -> Sequence[str]:
    """Return the lines of config.pbtxt by which a model whose file seems to batch does not."""
    # Without dims, max_batch_size 0 leaves the choice to the server.
    picture = max(spec.inputs, key=lambda item: len(item.dims))
    dims = ", ".join(map(str, spec.wire_dims(picture.dims)))
    return ["max_batch_size: 0", f"input {{ name: {_quoted(picture.name)} dims: [{dims}] }}"]


def describe_tensor(tensor: InputSpec | OutputSpec, spec: ModelSpec) -> str:
    """Return "name FP32[-1,3,224,224]"."""
    return f"{tensor.name} {tensor.dtype.value}[{','.join(map(str, spec.wire_dims(tensor.dims)))}]"


def _parameters(parameters: Mapping[str, str]) -> Iterator[str]:
    for key, text in parameters.items():
        if known := _DECLARED.get(key):
            yield from _comments([f"{known.help} ({known.kind.metavar})"])
        yield parameter_line(key, text)


def parameter_line(key: str, text: str) -> str:
    """Return the line of config.pbtxt that states a parameter."""
    return f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(text)} }} }}"


def _labels(folder: Path, spec: ModelSpec, chosen: Reading) -> Iterator[str]:
    """Write the label files, and yield the lines that name them."""
    named = {output: labels for output, labels in chosen.match.labels.items() if labels}
    contents = list(dict.fromkeys(named.values()))
    names = [LABELS if number == 1 else f"labels_{number}.txt" for number in range(1, len(contents) + 1)]
    for name, labels in zip(names, contents, strict=True):
        (folder / name).write_text("".join(f"{label}\n" for label in labels), "utf-8")
    files = {output: names[contents.index(labels)] for output, labels in named.items()}
    if not files:
        return
    yield ""
    yield from _comments(["Names of the classes, one a line. A list of outputs names all of them."])
    for item in spec.outputs:
        label = f" label_filename: {_quoted(files[item.name])}" if item.name in files else ""
        yield f"output {{ name: {_quoted(item.name)}{label} }}"


def _label_comments(spec: ModelSpec) -> Iterator[str]:
    yield from _comments(
        [f"Names of the classes: put them into {LABELS} beside this file, one a line, and remove the '# ':"]
    )
    yield from (f'# output {{ name: {_quoted(item.name)} label_filename: "{LABELS}" }}' for item in spec.outputs)


def _comments(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        clean = "".join(char if char.isprintable() else " " for char in text)
        indent = " " * (len(clean) - len(clean.lstrip()))
        yield from textwrap.wrap(
            clean.lstrip(),
            _WIDTH,
            initial_indent=f"# {indent}",
            subsequent_indent=f"# {indent}",
            break_on_hyphens=False,
        )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
