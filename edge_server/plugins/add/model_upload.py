"""HTTP handler with which the page adds a model file: runs `edge-server add` in a child process on the uploaded
file."""

from __future__ import annotations

import filecmp
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from edge_server.child_command import child_command
from edge_server.errors import Draining, InvalidRequest, LoadError, NotReady, ServingFault, Unsupported
from edge_server.frontends.http.access_check import AccessCheck
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.request_head import parse_query, parse_whole_number
from edge_server.frontends.http.response import HttpResponse, json_response
from edge_server.plugins.add.new_model import check_name, staging_folder
from edge_server.plugins.add.printed_report import OR_CHOOSE, PICTURE_MAY_DECIDE, WROTE
from edge_server.plugins.vision.layout_recognition import UNDECIDED
from edge_server.repository.model_config.pbtxt import parse_text

_SUFFIXES = (".onnx", ".tflite", ".gguf", ".ubj")
"""Suffixes of files that are whole models and hold no code."""
_TIMEOUT_S = 600.0


class ModelUploads:
    """Adds uploaded model files to a repository, one after the other."""

    def __init__(self, repository: Path, measurements_dir: str, access: AccessCheck) -> None:
        self._repository = repository
        self._measurements_dir = measurements_dir
        self._access = access
        self._lock = threading.Lock()
        self._is_stopping = False
        self._is_busy = False
        self._process: subprocess.Popen[str] | None = None

    def stop(self) -> None:
        """End the command that runs, and refuse further files."""
        with self._lock:
            self._is_stopping = True
        self._kill()

    def _kill(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()

    async def add(self, request: HttpRequest) -> HttpResponse:
        """Add the model file in the body; the path has its name. Return the report of `edge-server add`.

        The query's `picture_bytes` is the size of a picture that stands before the file, to try the model on. With
        `choose`, the number of a layout in the report, the file takes the place of the same one that is not decided.
        """
        self._access.check_change(request.peer)
        name = request.names["file"]
        stem, suffix = os.path.splitext(name)
        check_name(stem)
        if suffix.lower() not in _SUFFIXES:
            raise InvalidRequest(
                f"'{name[:200]}': expected a file that ends in {', '.join(_SUFFIXES)}; add others with edge-server add"
            )
        query = parse_query(request.head.target, ("picture_bytes", "choose"))
        picture_bytes = parse_whole_number("picture_bytes", query.get("picture_bytes", "0"))
        choice = parse_whole_number("choose", query["choose"]) if "choose" in query else None
        if not os.access(self._repository, os.W_OK | os.X_OK):
            raise Unsupported(f"the server may not write into its model repository '{self._repository}'")
        with self._lock:
            if self._is_busy:
                raise NotReady("another model is being added: try again when it is done")
            self._is_busy = True
        try:
            body = memoryview(await request.read_body())
            if picture_bytes > len(body):
                raise InvalidRequest(f"expected a picture of {picture_bytes} bytes, given a body of {len(body)}")
            with tempfile.TemporaryDirectory(prefix="edge-upload-") as folder:
                file = Path(folder, name)
                # No model file has a name without a suffix.
                picture = Path(folder, "picture") if picture_bytes else None
                try:
                    if picture is not None:
                        await request.run_blocking(partial(picture.write_bytes, body[:picture_bytes]))
                    await request.run_blocking(partial(file.write_bytes, body[picture_bytes:]))
                except OSError as error:
                    raise ServingFault(f"the uploaded file cannot be written: {error.strerror}") from error
                del body
                request.release_body()
                found = await request.run_blocking(partial(self._add, file, picture, choice))
        finally:
            self._kill()  # if the client left
            self._is_busy = False
        return json_response({"model": stem, **found})

    def _add(self, file: Path, picture: Path | None, choice: int | None) -> dict[str, object]:
        """Add the file, and return its report. Raises InvalidRequest, and then leaves the repository as it was."""
        if choice is None:
            return self._run(file, picture, ())
        undecided = self._repository / file.stem
        if not _is_undecided(undecided, file):
            raise InvalidRequest(
                f"'{file.stem}' is not in the repository as it was added from this file, with a layout to choose"
            )
        with staging_folder(self._repository) as staging:
            aside = staging / file.stem
            undecided.rename(aside)
            try:
                return self._run(file, picture, (f"--choose={choice}",))
            finally:
                if not undecided.exists():
                    aside.rename(undecided)

    def _run(self, file: Path, picture: Path | None, more: Sequence[str]) -> dict[str, object]:
        """Run the command with `more` flags, and return the report that it prints, also as JSON. Raises InvalidRequest
        with its error."""
        written = file.parent / "report"
        command = child_command("edge_server", "add", str(file), f"--model-repository={self._repository}", *more)
        command.append(f"--json={written}")
        command += [f"--state-dir={self._measurements_dir}"] if self._measurements_dir else []
        command += [f"--picture={picture}"] if picture is not None else []
        with self._lock:
            if self._is_stopping:
                raise Draining("the server stops")
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        try:
            output, errors = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise ServingFault(f"adding the model took longer than {_TIMEOUT_S:g} s") from None
        finally:
            with self._lock:
                self._process = None
        # The user knows the name of the file, and not the folder.
        output, errors = (text.replace(f"{file.parent}/", "") for text in (output, errors))
        if process.returncode < 0:
            raise ServingFault(f"the command that adds the model was ended by signal {-process.returncode}")
        if process.returncode > 0:
            raise InvalidRequest(errors.strip().removeprefix("edge-server add: ") or "the model cannot be added")
        output = output.partition(f"\n{WROTE}")[0].partition(f"\n{OR_CHOOSE}")[0]
        report, advice, _ = output.partition(PICTURE_MAY_DECIDE)
        if advice:  # for somebody without a command line
            report += f"{advice} delete the folder '{file.stem}'\nin the repository, then add the model with a picture."
        return {"report": report, **json.loads(written.read_bytes())}


def _is_undecided(folder: Path, file: Path) -> bool:
    """Return whether a model's folder has this file, and a configuration that says that its layout is not decided."""
    try:
        config = parse_text((folder / "config.pbtxt").read_bytes(), folder.name)
        copies = [path for path in (folder / "1").iterdir() if path.is_file()]
    except (OSError, LoadError):
        return False
    is_open = config.parameters["preprocessing"].string_value == UNDECIDED
    return is_open and any(filecmp.cmp(path, file, shallow=False) for path in copies)
