"""Report of `edge-server add` in the terminal: what a new model is, what it sees, how fast it is, and what to do
next."""

from __future__ import annotations

import json
import math
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from edge_server.cli.console import clean, render
from edge_server.core.model_spec import InputSpec, ModelSpec
from edge_server.core.tensor import DType
from edge_server.plugins.add.add_model import AddedModel, TriedModel
from edge_server.plugins.add.new_model import LABELS
from edge_server.plugins.add.picture_trial import MAX_SEEN, Reading, describe_choice, describe_seen
from edge_server.plugins.add.runtime_trial import RuntimeTrial
from edge_server.plugins.add.text_models import READER, find_unread_detectors
from edge_server.plugins.add.written_config import POLICY, describe_tensor, parameter_line
from edge_server.plugins.trials.precision_report import PrecisionReport

_WIDTH = 80
_MAX_LINES = 4
"""Maximum number of lines of a text behind a title. Some models have a dozen outputs."""
_MAX_INLINE_ELEMENTS = 16
"""Maximum number of elements of an input that are written out in a curl command."""
WROTE = "wrote "
"""Beginning of the line after the report."""
PICTURE_MAY_DECIDE = "picture of something that it knows may tell which:"
"""Beginning, after "A" or "Another", of the last lines of the report of a model whose layout is not decided."""
OR_CHOOSE = "Or delete the folder "
"""Beginning of the last lines of that report."""
_URL = "http://127.0.0.1:8000"


def say(text: str, title: str = "") -> None:
    """Print a text behind a title, wrapped to 80 columns. Behind a title, only the first lines are printed."""
    limit = _MAX_LINES if title else None
    lines = textwrap.wrap(
        clean(text), _WIDTH - 8 * bool(title), break_on_hyphens=False, max_lines=limit, placeholder=" ..."
    )
    for number, line in enumerate(lines):
        print(f"{title if number == 0 else '':8}{line}" if title else line)


class Row(NamedTuple):
    """A text behind a title, or without one."""

    text: str
    title: str = ""


def print_report(parts: Sequence[Row | Sequence[RuntimeTrial]]) -> None:
    """Print the parts of a report."""
    for part in parts:
        if isinstance(part, Row):
            if part.title.isdecimal():
                print()
            say(part.text, part.title)
        else:
            _print_runtimes(part)


def report_as_json(parts: Sequence[Row | Sequence[RuntimeTrial]], chosen_number: int | None) -> dict[str, object]:
    """Return the parts of a report as JSON. `chosen_number`: of the numbered layouts, the one that was chosen."""
    rows = [{"title": clean(part.title), "text": clean(part.text)} for part in parts if isinstance(part, Row)]
    runtimes = [item for part in parts if not isinstance(part, Row) for item in part]
    return {
        "rows": rows,
        "chosen": chosen_number,
        "runtimes": [
            {
                "runtime": item.title,
                "device": item.device,
                "precision": item.precision,
                "load_ms": round(item.load_ms, 3),
                "run_ms": round(item.median_ms, 6) if item.times_ms else None,
            }
            for item in runtimes
        ],
    }


def report_parts(
    tried: TriedModel, shown: Sequence[Reading], chosen: Reading | None
) -> Iterator[Row | Sequence[RuntimeTrial]]:
    """Yield what was found, with the runtimes that ran it as one part. `shown` are the layouts to choose from if
    `chosen` is None: each begins with a row whose title is its number, from 1 on."""
    spec = tried.spec
    verb = "for" if spec.is_decoupled and not any(item.load_ms for item in tried.trials) else "opened by"
    size = tried.files.size_bytes
    shown_size = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
    yield Row(f"{tried.files.shown_name}: {shown_size}, {verb} {spec.backend}")
    if spec.is_decoupled:
        yield Row(_stream_model_kind(spec), "kind")
    else:
        for title, tensors in (("input", spec.inputs), ("output", spec.outputs)):
            for tensor in tensors:
                yield Row(describe_tensor(tensor, spec), title)
    for note in tried.notes:
        yield Row(note, "note")
    if tried.is_unbatched:
        yield Row("the rows of all pictures of a batch are in one list, so config.pbtxt has max_batch_size 0", "note")
    if chosen is not None:
        yield Row(chosen.title, "kind")
        if not chosen.match.is_certain:
            yield Row(describe_choice(chosen, tried.readings), "chosen")
        yield from _evidence(chosen)
        yield from _finding(chosen)
        for line in tried.lines:
            yield Row(f"{line.text!r} {line.score:.2f}" if line.text else "nothing", "reads")
    elif shown:
        yield Row("not certain, as the file does not say it; it may be one of these", "kind")
    elif not tried.notes and not spec.is_decoupled:
        found = tried.recognised
        yield Row("tensors (tabular or other); no known vision model" if found is None else found.note, "kind")
    if tried.tabular_batch_size:
        yield Row(f"up to {tried.tabular_batch_size} in a request (max_batch_size in config.pbtxt)", "rows")
    elif tried.is_tabular:
        yield Row(f"up to {spec.max_batch_size} in a request", "rows")
    explained: set[str] = set()
    for number, reading in enumerate(shown, 1) if chosen is None else ():
        yield Row(reading.title, f"{number}")
        if reading.match.layout not in explained:
            yield from _evidence(reading)
        explained.add(reading.match.layout)
        yield from _finding(reading)
    if chosen is not None and chosen.match.task == "text" and len(tried.recognisers) == 1:
        verb = "names" if tried.is_pair else "may name"
        yield Row(f"detection_text_model of its config.pbtxt {verb} {tried.recognisers[0]}", "reader")
    yield from _trials(tried)
    if tried.faster_backend:
        yield Row(
            f'{tried.faster_backend} was faster here: backend: "{tried.faster_backend}" in config.pbtxt chooses it'
        )
    if any(reading.lacks_class_names for reading in ([chosen] if chosen is not None else shown)):
        yield Row(
            f"The classes have no names: put a {LABELS} with a line for each class beside config.pbtxt, and remove the "
            f"'# ' before its line with label_filename. `edge-server add` itself takes a {LABELS} that lies beside the "
            "model, or a text file named behind it."
        )


def print_undecided(shown: Sequence[Reading], folder: Path, *, has_picture: bool) -> None:
    """Print what the trial says of layouts none of which is chosen, and what to do. `has_picture`: the user gave it."""
    has_labels = any(reading.match.labels for reading in shown)
    say(
        "Not decided: config.pbtxt has them as comments. Remove the '# ' before the parameters of one"
        + (", and before its line with label_filename." if has_labels else ".")
    )
    numbers: dict[str, list[int]] = {}
    for number, reading in enumerate(shown, 1):
        numbers.setdefault(reading.best_class, []).append(number)
    if has_picture and shown[0].best_class:
        found = "; ".join(f"{name} is the best class of {_join_numbers(those)}" for name, those in numbers.items())
        say(
            f"Your picture did not decide: {found}. Of those that are right, take the one with the values of the "
            "training (ToTensor alone: pixels / 255)."
        )
        _say_choose(folder)
        return
    seeing = [number for number, reading in enumerate(shown, 1) if reading.score > 0]
    if has_picture and seeing:
        surest = "; number 1 is the surest" if len(seeing) > 1 else ", but is not sure enough"
        say(f"Your picture did not decide: something in it is seen by {_join_numbers(seeing)}{surest}.")
    elif has_picture:
        say("Your picture did not decide: none of them sees more in it than in noise.")
    article = "Another" if has_picture else "A"
    say(f"{article} {PICTURE_MAY_DECIDE} delete the folder '{folder}', then add the model again with --picture=FILE.")
    _say_choose(folder)


def _say_choose(folder: Path) -> None:
    say(f"{OR_CHOOSE}'{folder}', and add the model again with --choose=NUMBER.")


def _join_numbers(numbers: Sequence[int]) -> str:
    """Return "number 1" or "numbers 1, 2 and 3"."""
    *others, last = map(str, numbers)
    return f"numbers {', '.join(others)} and {last}" if others else f"number {last}"


def _evidence(reading: Reading) -> Iterator[Row]:
    yield Row(reading.match.evidence, "because")
    for doubt in reading.match.doubts:
        yield Row(doubt, "unsure")
    for labels in dict.fromkeys(reading.match.labels.values()):
        rest = f" ... {len(labels)} in all" if len(labels) > MAX_SEEN else ""
        yield Row(f"{', '.join(labels[:MAX_SEEN])}{rest}", "labels")


def _finding(reading: Reading) -> Iterator[Row]:
    picture, noise = reading.finding.picture, reading.finding.noise
    if picture is not None and noise is not None:
        yield Row(describe_seen(picture), "picture")
        if picture.detections or noise.detections:
            scores = [item.score for item in noise.detections]
            yield Row(f"{len(scores)} detections" + (f", the best {max(scores):.2f}" if scores else ""), "noise")
            if scores:
                yield Row(
                    "a picture of noise has no objects: detection_head, image_scale or image_color may be another, or "
                    "detection_score_threshold too low",
                    "note",
                )
    for problem in reading.finding.problems:
        yield Row(problem, "problem")


def _print_runtimes(trials: Sequence[RuntimeTrial]) -> None:
    rows = [
        (
            item.title,
            item.device,
            item.precision,
            f"{item.load_ms:.0f}",
            f"{item.median_ms:.3g}" if item.times_ms else "-",
        )
        for item in trials
    ]
    print()
    print(render(("RUNTIME", "DEVICE", "PRECISION", "LOAD MS", "RUN MS"), rows, sys.stdout))
    print()


def _trials(tried: TriedModel) -> Iterator[Row | Sequence[RuntimeTrial]]:
    opened = [item for item in tried.trials if not item.reason]
    if opened:
        yield opened
    if opened and tried.open_inputs:
        names = ", ".join(f"'{name}'" for name in tried.open_inputs)
        yield Row(f"The times are not kept for the choice of the runtime: {names} may have any size, and 1 was tried.")
    for item in tried.trials:
        if item.reason:
            reason = item.reason.removeprefix(f"'{tried.files.path}': ").removeprefix(f"{item.backend} ")
            outcome = "opened, but a trial run failed: " if item.load_ms else ""
            yield Row(f"{item.backend}: {'not opened: ' if tried.spec.is_decoupled else outcome}{reason}")


def print_comparison(added: AddedModel) -> str:
    """Print the scores of --compare beside ours. Return the problem in words, empty if there is none."""
    compared, chosen = added.tried.comparison, added.chosen
    if compared is None:
        return ""
    ours = compared.attempt_of(chosen) if chosen is not None else next(iter(compared.attempts), None)
    if ours is None:
        problem = "The scores were not compared, as the model was not tried."
    else:
        labels = next(iter(chosen.match.labels.values()), ()) if chosen is not None else ()
        labels = labels or compared.reference.labels
        print()
        titles = ("CLASS OR ELEMENT", "REFERENCE", "OURS" if chosen is not None else "NEAREST")
        print(render(titles, compared.rows(ours, labels), sys.stdout))
        print()
        problem = compared.find_problem(ours, labels)
        agrees = f"They agree: the largest difference is {ours.difference:.2g} of the greatest value"
        remark = f", {ours.remark}" if ours.remark else ""
        if not problem:
            say(f"{agrees}{remark}.")
    if problem:
        say(problem)
    return problem


def print_precisions(found: PrecisionReport | None, *, has_pictures: bool) -> None:
    """Print how a model does in other precisions. `has_pictures`: on those of the user."""
    if found is None or not found.lines:
        return
    print()
    say(
        "Other precisions" + ("" if has_pictures else ", on a portrait; --picture=FOLDER takes pictures of yours") + ":"
    )
    for line in found.lines:
        say(line)
    if found.advice:
        print(found.advice)


def print_next_steps(added: Sequence[AddedModel]) -> None:
    """Print how to serve and to ask models that are in their place."""
    for item in added:
        print(f"{WROTE}{item.folder}")
    tried, chosen, folder, _ = added[0]
    spec = tried.spec
    print(f"\nServe it:\n  edge-server serve --model-repository={shlex.quote(str(folder.parent))}")
    name = shlex.quote(spec.name)
    picture_request = f"curl --data-binary @picture.jpg {_URL}/edge/v1/models/{name}/perception"
    if chosen is not None and chosen.match.layout == READER:
        detectors = [str(folder.parent / name / "config.pbtxt") for name in find_unread_detectors(folder.parent)]
        print(f"Name it in {' or '.join(detectors[:MAX_SEEN]) or 'the config.pbtxt of a text detector'}:")
        print(f"  {parameter_line('detection_text_model', spec.name)}")
    elif chosen is not None:
        print(f"Ask it:\n  {picture_request}")
        if chosen.match.task == "text" and not tried.is_pair:
            is_known = len(tried.recognisers) == 1
            recogniser = tried.recognisers[0] if is_known else "NAME"
            reader = recogniser if is_known else "a recogniser NAME"
            print(f"To have {reader} read the lines, add to {folder / 'config.pbtxt'}:")
            print(f"  {parameter_line('detection_text_model', recogniser)}")
    elif spec.is_decoupled:
        print(_stream_model_command(spec, name))
    elif tried.recognised is not None and POLICY in tried.recognised.parameters:
        print("for a robot, by --policy-openpi or --policy-groot=HOST:PORT (docs/robots.md)")
    elif any(reading.is_shown for reading in tried.readings):
        print(f"Decide what it is, then ask it:\n  {picture_request}")
    else:
        print(f"Ask it:\n  {_curl(spec, f'{_URL}/v2/models/{name}/infer')}")


def _stream_model_kind(spec: ModelSpec) -> str:
    if spec.output("audio") is not None:
        voices = spec.parameters.get("voices", "").split(", ")
        more = f" and {len(voices) - MAX_SEEN} more" if len(voices) > MAX_SEEN else ""
        return f"text to speech, with the voices {', '.join(voices[:MAX_SEEN])}{more}"
    return "a language model" if spec.input("audio") is None else "speech to text"


def _stream_model_command(spec: ModelSpec, name: str) -> str:
    """Return the line that says how to ask a model that answers with a stream."""
    if spec.output("audio") is not None:
        body = json.dumps({"model": spec.name, "input": "Hello.", "response_format": "wav"})
        return f"Hear it:\n  curl {_URL}/v1/audio/speech --data {shlex.quote(body)} -o hello.wav"
    if spec.input("audio") is not None:
        return f"Ask it:\n  curl {_URL}/v1/audio/transcriptions -F file=@spoken.wav -F model={name}"
    return f"Talk to it:\n  edge-server chat {name}"


def _curl(spec: ModelSpec, url: str) -> str:
    """Return a command that sends zeros, or empty texts, with free dimensions of 1."""
    given = [item for item in spec.inputs if not item.is_optional]
    shapes = [[*((1,) if spec.max_batch_size > 0 else ()), *map(abs, item.dims)] for item in given]
    heads = [
        {"name": item.name, "datatype": item.dtype.value, "shape": shape}
        for item, shape in zip(given, shapes, strict=True)
    ]
    counts = list(map(math.prod, shapes))
    if max(counts, default=0) <= _MAX_INLINE_ELEMENTS:
        inputs = [{**head, "data": [_zero(item)] * n} for head, item, n in zip(heads, given, counts, strict=True)]
        return f"curl {url} --data {shlex.quote(json.dumps({'inputs': inputs}))}"
    texts = [
        f'{{**{json.dumps(head)}, "data": [{_zero(item)!r}] * {n}}}'
        for head, item, n in zip(heads, given, counts, strict=True)
    ]
    program = f'import json; print(json.dumps({{"inputs": [{", ".join(texts)}]}}))'
    return f"python3 -c {shlex.quote(program)} |\n  curl {url} --data @-"


def _zero(item: InputSpec) -> object:
    return {DType.BYTES: "", DType.BOOL: False}.get(item.dtype, 0)
