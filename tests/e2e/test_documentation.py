"""The commands, links, options and examples of the documentation, as written.

Each fenced block has an invisible comment on the line before it, which names what runs it, or why nothing does:

- `<!-- run -->`: this module does. The blocks of a page run in their order in one folder that looks like a clone.
- `<!-- file NAME -->`: it is written to NAME there.
- `<!-- run by tests/x/test_y.py -->`: that test reads the page and runs it.
- `<!-- not run: WHY -->`.

Blocks in a language of READERS are read by the server's own code and need none; so do blocks without a language, which
are layouts and output.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2  # noqa: F401 - many blocks send pictures
import pytest

from edge_server.config.merge_settings import parse_serve
from edge_server.config.triton_flag_compatibility import IGNORED
from edge_server.plugin import own_plugins
from edge_server.plugins.cameras.source_and_sink_settings import check_required_zones, read_entries
from edge_server.plugins.fleet.publish.command import read_rollout
from edge_server.plugins.fleet.release import read_release
from edge_server.repository.model_config import pbtxt
from edge_server.repository.model_config.parameter_names import read_names
from tests.e2e.yolo_exports import ULTRALYTICS, detect, export
from tests.kit.server import COMMAND, clean_environment, serve

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES += [
    page
    for folder in ("docs", "edge_server", "fleet", "hil_tests", "jetson", "systemd", "tests")
    for page in sorted((ROOT / folder).rglob("*.md"))
]
EXAMPLES = ROOT / "docs" / "examples"

OPTIONS_OF_OTHERS = {
    "--data-binary", "--cacert", "--cert", "--key", "--system-site-packages", "--dry-run", "--python", "--arch",
    "--model-repositry", "--build-arg", "--device", "--gpus", "--runtime", "--group-add", "--network", "--rm",
    "--uninstall", "--wheels", "--create", "--now", "--report", "--hypothesis-profile", "--work",
    "--site-needs-contact", "--modelfile", "--reload", "--workers", "--force-reinstall", "--purge", "--input",
    "--quick-generate-key", "--export", "--exclude", "--server", "--listen", "--dry", "--only", "--seconds", "--split",
    "--extras", "--set", "--triton", "--triton-python", "--backends", "--again", "--cells", "--concurrency-range",
    "--percentile",
}  # fmt: skip
"""Options of curl, pip, python, uvicorn, docker, helm, ollama, systemd, gpg, rsync, the installer, the package builder,
the bridge for LeRobot, perf_analyzer, the benchmarks and the tests; the misspelling in an error message; and the plugin
of plugins.md."""


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with serve(ROOT / "model_repository") as server:
        yield server


def test_each_page_says_first_whom_it_is_for_and_sends_no_user_into_source_files() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        if page.name == "README.md":
            continue
        text = page.read_text()
        assert text.split("\n\n")[1].startswith("For "), page.name
        if page.name not in ("architecture.md", "plugins.md"):
            assert "](../edge_server/" not in text, page.name


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page, without code blocks. Code in a line is one word, and the target of a link
    none."""
    text = re.sub(r"<!--.*?-->|<img[^>]*>", "", re.sub(r"```.*?```", "\n\n", text, flags=re.DOTALL), flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*[-*|#]|\s*\d+\. )", text):
        for cell in block.split("|") if block.lstrip().startswith("|") else [block]:
            plain = " ".join(re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", cell)).split())
            yield from re.split(r"(?<=[.!?:;])\s+(?=[A-Z\[(\"']|code)", plain)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_is_longer_than_35_words_and_no_page_than_5000(page: Path) -> None:
    if page.name == "CHANGELOG.md" or page.parent.name == "reference" or page.is_relative_to(ROOT / "tests"):
        return  # lists of changes; generated from the code; for who works on the tests
    text = page.read_text()
    assert len(text.split()) <= 5000
    assert [found for found in sentences(text) if len(re.findall(r"[\w'-]+", found)) > 35] == []


def find_links(page: Path) -> list[tuple[Path, str]]:
    """Return the file and the anchor ("" or "#...") of each link to the repository."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [
        ((page.parent / target).resolve() if target else page, anchor)
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", text)
        if not target.startswith(("http://", "https://"))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page: Path) -> None:
    for path, anchor in find_links(page):
        assert path.exists(), f"{path} is not there"
        if anchor and path.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor[1:] in slugs, f"{path}{anchor} is no heading"


def test_the_index_names_each_document_and_leads_to_the_pages_of_the_other_folders() -> None:
    index = ROOT / "docs/README.md"
    documents = {*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/reference").glob("*.md")} - {index}
    assert documents <= {path for path, _ in find_links(index)}
    reached, waiting = set(), [index]
    while waiting:
        page = waiting.pop()
        if page not in reached and page in PAGES:
            reached.add(page)
            waiting += [path / "README.md" if path.is_dir() else path for path, _ in find_links(page)]
    folders = ("fleet", "hil_tests", "jetson", "systemd", "docs/examples")
    of_users = {ROOT / "SECURITY.md", *(page for name in folders for page in (ROOT / name).rglob("*.md"))}
    assert of_users <= reached


def test_the_first_sentence_of_a_page_states_the_minutes_that_reading_takes() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        if page.name == "README.md":
            continue
        text = page.read_text()
        stated = re.search(r"^For .*?\((\d+) minutes\)[.:;]", text.split("\n\n")[1], re.DOTALL)
        assert stated, f"{page.name}: how many minutes does reading take?"
        needed = len(text.split()) / 200
        assert abs(int(stated[1]) - needed) <= max(1, needed / 10), f"{page.name} takes {needed:.1f} minutes"


IN_OWN_WORDS = (
    "The service ends with code", "429 and 503", "context_length_exceeded", "401, 403", "A client on another",
    "ModuleNotFoundError", "Connection refused", "A camera says", "The result is", "has no field named",
    "there is no SHA256SUMS", "A model loads", "Other messages",
)  # fmt: skip
"""Beginnings of headings in troubleshooting.md that are no text of the server's own code."""


def test_the_headings_about_messages_have_the_words_of_the_code() -> None:
    sources = {path: path.read_text() for kind in ("py", "js") for path in (ROOT / "edge_server").rglob(f"*.{kind}")}

    @functools.cache
    def literals(path: Path) -> str:
        if path.suffix == ".js":
            return sources[path]
        nodes = ast.walk(ast.parse(sources[path]))
        return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))

    def is_in_a_literal(words: str) -> bool:
        # To parse each file takes seconds. A literal may go on in the next line, but not within a word.
        first = re.search(r"\w*", words.lstrip())[0]
        found = [path for path, text in sources.items() if first in text]
        return any(words in literals(path) for path in sorted(found, key=lambda path: words not in sources[path]))

    headings = re.findall(r"^### (.*)$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    for heading in headings:
        if not heading.startswith(IN_OWN_WORDS):
            for words in heading.split("..."):
                assert is_in_a_literal(words), f"{heading!r}: no message has {words!r}"


@pytest.mark.parametrize(
    ("heading", "path", "body"),
    [
        ("Request for unknown model: ", "/v2/models/absent/infer", b'{"inputs": []}'),
        (
            "unexpected inference input ", "/v2/models/efficientnet_lite0/infer",
            b'{"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1]}]}',
        ),
        ("failed to parse the request JSON buffer: ", "/v2/models/efficientnet_lite0/infer", b"{"),
        ("explicit model load / unload is not allowed", "/v2/repository/models/efficientnet_lite0/load", b""),
        (
            "shared memory of clients is not allowed", "/v2/systemsharedmemory/region/r/register",
            b'{"key": "/r", "offset": 0, "byte_size": 4}',
        ),
    ],
)  # fmt: skip
def test_the_statuses_of_failed_requests_are_those_of_the_server(
    heading: str, path: str, body: bytes, server: Any
) -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    stated = re.search(rf"^### {re.escape(heading)}.*\n\nWith (\d+)", page, re.MULTILINE)
    assert stated is not None
    status, answer = server.request("POST", path, body)
    assert heading in json.loads(answer)["error"]
    assert status == int(stated[1])


def test_every_option_exists() -> None:
    known = set(
        re.findall(r"--[a-z][a-z0-9-]+", "".join(p.read_text() for p in (ROOT / "docs/reference").glob("*.md")))
    )
    known |= OPTIONS_OF_OTHERS | {"--help", "--version"} | set(IGNORED)
    for page in PAGES:
        if page.parent.name == "reference":
            continue
        text = page.read_text()
        code = re.findall(r"```.*?```", text, re.DOTALL) if page.name != "CONTRIBUTING.md" else []
        spans = re.findall(r"`[^`\n]+`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        blocks = [block.replace("\\\n", " ") for block in code]
        lines = [line for block in blocks for line in block.splitlines() if "edge-server" in line or "--" in line]
        for piece in (*spans, *lines):
            if re.search(r"\b(pip|ruff|pytest|docker|podman|git|apt|openssl|aiperf|optimum-cli|ray)\b", piece):
                continue
            for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", piece):
                assert option in known, f"{page.name}: {option} in {piece!r}"


@dataclass(frozen=True)
class Block:
    """A fenced block. `mark` is the first comment on the line before it, such as "run"."""

    mark: str
    language: str
    code: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^(?:<!-- (.*?) -->.*\n)?```(.*)\n((?:.*\n)*?)```$", page.read_text(), re.MULTILINE)
    return [Block(*texts) for texts in found]


def of_page(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=of_page)
def test_each_code_block_is_run_or_states_why_not(page: Path) -> None:
    for block in blocks(page):
        if block.mark.startswith("run by "):
            test = block.mark.removeprefix("run by ")
            assert page.name in (ROOT / test).read_text(), f"{test} does not read {page.name}"
        elif block.mark == "run" or block.mark.startswith("file "):
            assert of_page(page) in RUN, "add the page to RUN"
        elif block.mark or block.language not in ("", "mermaid", *READERS):
            assert re.fullmatch("not run: .+", block.mark), f"what runs this block, or why is it not run?\n{block.code}"


def read_toml(path: Path) -> None:
    if "[[" in path.read_text():
        check_required_zones(*read_entries(str(path)))
    elif "[models." in path.read_text():
        for model, custom in read_rollout(path, re.findall(r"\[models\.(\w+)\]", path.read_text())).items():
            assert read_release(f"{model}/1.json", custom)
    else:
        parse_serve(["--model-repository=models", f"--config={path}"], {}, own_plugins())


def read_pbtxt(path: Path) -> None:
    assert set(pbtxt.read_file(path, "m").parameters) <= read_names()


READERS: dict[str, Callable[[Path], object]] = {
    "json": lambda path: json.loads(path.read_text()), "pbtxt": read_pbtxt, "toml": read_toml,
}  # fmt: skip


@pytest.mark.parametrize("language", READERS)
def test_configurations_are_read_by_the_server(language: str, tmp_path: Path) -> None:
    found = [block for page in PAGES for block in blocks(page) if block.language == language]
    assert found
    for block in found:
        (tmp_path / "block").write_text(block.code)
        READERS[language](tmp_path / "block")


ACTIVATION = ". .venv/bin/activate"
AT_A_COMMAND = r"(?:^|&&|\||;|\bdo) *"


def sh_blocks(page: Path) -> list[str]:
    return [block.code.replace("\\\n", " ") for block in blocks(page) if block.language == "sh"]


@pytest.mark.parametrize("page", [page for page in PAGES if sh_blocks(page)], ids=of_page)
def test_commands_exist_in_a_clone_after_the_readmes_first_command(page: Path) -> None:
    """Programs are named by their path or after the activation; files of the clone are there."""
    is_activated = page.parent.name == "edge_server_ros"  # For the Python of ROS, outside of a clone.
    for code in sh_blocks(page):
        is_activated |= ACTIVATION in code
        bare = re.findall(rf"{AT_A_COMMAND}((?:edge-server|pip|python) .*)", code, re.MULTILINE)
        assert is_activated or not bare, f"{bare[0]}: which program? The line `{ACTIVATION}` comes first"
        for folder, rest in re.findall(r"(?<![\w/.-])(fleet|hil_tests|jetson|systemd|tests)/([\w./-]*\w)", code):
            assert (ROOT / folder / rest).exists(), f"{folder}/{rest} is not there"


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_extras_are_installed_from_the_clone_or_a_folder_and_exist(page: Path) -> None:
    known = importlib.metadata.metadata("edge-server").get_all("Provides-Extra")
    for command in re.findall(r"pip install [^\n`|]*", page.read_text()):
        is_from_folder = "--no-index --find-links=" in command
        assert is_from_folder or "edge-server[" not in command, f"{command}: no index has edge-server, write '.[...]'"
        for extras in re.findall(r"(?:\.|edge-server)\[(.*?)\]", command):
            assert {extra.replace("_", "-") for extra in extras.split(",")} <= set(known or ()), command


def test_the_quickstart_names_each_extra() -> None:
    table = (ROOT / "docs/quickstart.md").read_text().partition("| Extra |")[2].partition("\n\n")[0]
    extras = importlib.metadata.metadata("edge-server").get_all("Provides-Extra") or ()
    assert set(extras) == set(re.findall(r"`([a-z-]+)`", table))


def test_arguments_are_known_to_their_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks; and in sentences, which may leave out what a command requires."""
    monkeypatch.syspath_prepend(str(ROOT / "docs/reference"))
    parsers = importlib.import_module("parsers")

    @functools.cache
    def parser_of(module: str, is_whole: bool) -> argparse.ArgumentParser:
        parser = parsers.parser_of(module)
        for action in () if is_whole else parsers.actions_of(parser):
            action.required = False
        return parser

    for page in PAGES:
        if page.name == "CHANGELOG.md" or page.parent.name == "reference":
            continue
        code = "\n".join(sh_blocks(page))
        sentences = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        found = [
            (line, True) for line in re.findall(rf"{AT_A_COMMAND}(?:\S*/)?edge-server ([^|&\n]*)", code, re.MULTILINE)
        ]
        found += [(re.sub(r"[\[\]]", "", line), False) for line in re.findall(r"`edge-server (\w[^`\n]*)`", sentences)]
        for line, is_whole in found:
            command, *arguments = shlex.split(line.replace("=HEX", "=" + "0" * 64), comments=True)
            if command in ("serve", "check"):
                parse_serve(["--model-repository=models", *arguments[command == "check" :]], {}, own_plugins())
                continue
            module = parsers.COMMANDS[command].module
            if command == "ros":
                module += f"_{arguments.pop(0)}"
            try:
                parser_of(module, is_whole).parse_args(arguments)
            except SystemExit:
                pytest.fail(f"{of_page(page)}: edge-server {line}")


NEED_TUF = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("tuf") is None, reason="needs tuf, of the extra test-all"),
]
NEED_ENGINES = [
    pytest.mark.full,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("xllamacpp", "openai")),
        reason="needs xllamacpp and openai, of the extra test-all",
    ),
]
LANGUAGE_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
RUN = {
    "docs/quickstart.md": (),
    "docs/http-and-grpc.md": (),
    # Each starts servers of the bundled models; quickstart.md has the same server, test_add_command.py adds models.
    "docs/coming-from.md": [pytest.mark.full],
    "docs/models.md": [pytest.mark.full],
    "docs/python-models.md": (),
    "docs/cameras.md": [pytest.mark.full],
    "docs/camera-results.md": [pytest.mark.full],
    "docs/deployment.md": [pytest.mark.full],
    "docs/fleet.md": NEED_TUF,
    "docs/operations.md": [pytest.mark.full],
    "docs/language-models.md": NEED_ENGINES,
    "docs/text-apis.md": NEED_ENGINES,
}
"""Pages with blocks that this module runs -> marks of their test."""


class Terminal:
    """The folder of a clone after the README's first command, in which a reader types the blocks of a page.

    Its `edge-server` asks the server at hand where a command names no other, as servers of tests have ports that the
    system picks; `serve` starts one and stops the one before. `pip` does nothing: the tests come with their packages.
    `curl` fails where the server answers an error.
    """

    def __init__(self, folder: Path, server: Any, serve: Any) -> None:
        self._folder = folder
        self._serve = serve
        self._server = server
        self._own_server = contextlib.ExitStack()
        self._activation = ""
        for path in ROOT.iterdir():
            if path.name not in (".git", ".venv", "model_repository"):
                (folder / path.name).symlink_to(path)
        shutil.copytree(ROOT / "model_repository", folder / "model_repository")
        shutil.copy(ROOT / "tests/data/tiny_llm/tiny.gguf", folder / LANGUAGE_MODEL)
        (folder / "yolo11n.onnx").write_bytes(export(detect(), ULTRALYTICS).SerializeToString())
        programs = folder / ".venv/bin"
        programs.mkdir(parents=True)
        (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
        (folder / ".curlrc").write_text("fail\n")
        self._write(programs / "pip", ":")
        self._write(programs / "python", f'exec {sys.executable} "$@"')
        self._point_commands()

    def close(self) -> None:
        self._own_server.close()

    def type(self, block: Block) -> None:
        """Run a block. Its lines with `serve` start servers."""
        if block.language == "python":
            self._run(sys.executable, "-c", self._with_ports(block.code))
        else:
            code = block.code.replace("\\\n", " ")
            for part in re.split(r"^(.*\bedge-server serve .*)$", code, flags=re.MULTILINE):
                if "edge-server serve " in part:
                    self._start(shlex.split(part)[2:])
                elif part.strip():
                    self._run("bash", "-euo", "pipefail", "-c", self._activation + self._with_ports(part))
        if ACTIVATION in block.code:
            self._activation = f"{ACTIVATION}\n"

    def _start(self, flags: list[str]) -> None:
        repository = next(flag for flag in flags if flag.startswith("--model-repository="))
        flags.remove(repository)
        self._own_server.close()
        self._server = self._own_server.enter_context(self._serve(Path(repository.partition("=")[2]), *flags))
        self._point_commands()

    def _point_commands(self) -> None:
        self._write(
            self._folder / ".venv/bin/edge-server",
            f"""command=$1; shift
            case $command in
              chat | models | perf | status) set -- --url=http://{self._server.http} "$@" ;;
              stream) set -- --address={self._server.grpc} "$@" ;;
            esac
            exec {COMMAND} "$command" "$@" """,
        )

    def _with_ports(self, code: str) -> str:
        for written, address in ((":8000", self._server.http), (":8001", self._server.grpc)):
            code = code.replace(written, f":{address.rpartition(':')[2]}")
        return code

    @staticmethod
    def _write(program: Path, code: str) -> None:
        program.write_text(f"#!/bin/sh\n{code}\n")
        program.chmod(0o755)

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            command, cwd=self._folder, env=clean_environment({"CURL_HOME": str(self._folder)}), text=True, timeout=100,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed: apt-get install curl")
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in RUN.items()])
def test_the_code_blocks_of_a_page_work_in_order(
    name: str, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the README's state: its server runs."""
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(Terminal(tmp_path, server, serve)) as terminal:
        for block in blocks(ROOT / name):
            if block.mark.startswith("file "):
                path = tmp_path / block.mark.removeprefix("file ")
                path.parent.mkdir(parents=True, exist_ok=True)
                # An address of no existing network.
                path.write_text(block.code.replace("192.168.1.20", "127.0.0.1:9"))
            elif block.mark == "run":
                terminal.type(block)


@pytest.mark.full
def test_the_shown_report_of_a_classifier_is_what_add_prints(tmp_path: Path) -> None:
    written = blocks(ROOT / "docs/own-model.md")
    (place,) = [index for index, found in enumerate(written) if "loudspeaker" in found.code]
    command, shown = written[place - 1].code.replace("\\\n", " "), written[place].code
    program, *arguments, repository = shlex.split(command)
    assert (program, repository) == ("edge-server", "--model-repository=model_repository")
    printed = run(COMMAND, *arguments, f"--model-repository={tmp_path / 'models'}").splitlines()
    for line in filter(None, shown.splitlines()):
        assert line in printed, "\n".join(printed)
        del printed[: printed.index(line) + 1]


def run(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def example_lines() -> list[Any]:
    """The commands of docs/examples/README.md, each with the pattern of a line that it prints."""
    text = (EXAMPLES / "README.md").read_text()
    found = re.search(r"<!-- run by .*? -->\n```sh\n(.*?)\n```", text, re.DOTALL)
    assert found is not None
    lines = [line for line in found[1].splitlines() if ".venv/bin/pip" not in line]  # the test extra has the package
    coffee = r"0\.949 espresso"
    patterns = (coffee, r"frame \d+: 0\.9\d at 17\d,6\d", r"probabilities \(1, 1000\)", coffee, ".*:espresso.*")
    return [
        pytest.param(
            line,
            pattern,
            id=line.split()[0].rpartition("/")[2] + " " + line.split()[1],
            marks=pytest.mark.skipif(
                "/" not in line.split()[0] and shutil.which(line.split()[0]) is None, reason="not installed"
            ),
        )
        for line, pattern in zip(lines, patterns, strict=True)
    ]


@pytest.mark.parametrize(("line", "pattern"), example_lines())
def test_a_command_of_the_examples_works_as_written(line: str, pattern: str, server: Any, tmp_path: Path) -> None:
    host, port = server.http.split(":")
    for written, here in (
        ("/tmp/infer", f"{tmp_path}/infer"), (".venv/bin/python", sys.executable),
        ("127.0.0.1:8000", server.http), ("127.0.0.1:8001", server.grpc), ("127.0.0.1 8000", f"{host} {port}"),
    ):  # fmt: skip
        line = line.replace(written, here)
    assert re.search(rf"^{pattern}$", run("sh", "-c", line), re.MULTILINE)


@pytest.mark.parametrize("name", ["infer_http.py", "camera_stream.py", "infer_grpc.py --help", "infer.js"])
def test_an_example_without_its_arguments_prints_its_usage(name: str) -> None:
    file, *options = name.split()
    program = sys.executable if file.endswith(".py") else "node"
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    ended = subprocess.run([program, EXAMPLES / file, *options], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert re.fullmatch(rf"usage: .*{re.escape(file)} .*\[HOST:PORT\]\n", ended.stderr)
