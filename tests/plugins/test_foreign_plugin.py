"""A plugin of another package, as docs/plugins.md has it: made, installed and used here with the installed server."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forked_commands import ForkedCommands

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"

FAILING = """
from edge_server.config.setting import ConfigError
from edge_server.errors import ServingFault
from edge_server.plugin import Plugin, RunningPlugin


class Failing(RunningPlugin):
    def build(self, core):
        raise {error}


class FailingPlugin(Plugin):
    name = "failing"
    is_required = {is_required}

    def prepare(self, config):
        return Failing()


PLUGIN = FailingPlugin()
"""


def install(folder: Path, package: str, files: dict[str, str], *entries: str) -> None:
    """Write a package, and its entry points, as an installer does."""
    (folder / package).mkdir(parents=True)
    for name, text in files.items():
        (folder / package / name).write_text(text)
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[edge_server.plugins]", *entries, ""]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the package of the page."""
    blocks = re.findall(r"```python\n# site_rules/(\w+\.py):.*?\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["plugin.py", "running.py", "contact.py"]
    assert sum(text.count("\n") for _, text in blocks) <= 60
    entry = re.search(r"```\n\[project.*\n(\w+) = \"(.*)\"", PAGE.read_text())
    assert entry is not None
    folder = tmp_path_factory.mktemp("site")
    install(folder, "site_rules", dict(blocks), f"{entry[1]} = {entry[2]}", "absent = no_such_module:PLUGIN")
    return folder


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """`run(folder, *arguments)`: the program, with a folder of packages."""
    programs: dict[Path, ForkedCommands] = {}
    with contextlib.ExitStack() as stack:

        def run_program(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
            if folder not in programs:
                commands = ForkedCommands(folder, tmp_path_factory.mktemp("outputs"))
                programs[folder] = stack.enter_context(commands)
            return programs[folder](*arguments)

        yield run_program


def fetch(address: str, path: str) -> Any:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as reply:
        text = reply.read().decode()
    return json.loads(text) if reply.headers["Content-Type"].startswith("application/json") else text


def add_model(models: Path, name: str, parameters: str = "") -> None:
    (models / name / "1").mkdir(parents=True)
    (models / name / "config.pbtxt").write_text(
        'backend: "identity" input { name: "x" data_type: TYPE_FP32 dims: [1] } '
        f'output {{ name: "x" data_type: TYPE_FP32 dims: [1] }} {parameters}'
    )


def test_a_plugin_adds_a_setting_route_metric_command_check_and_status_line(
    site: Path, run: Callable[..., Any], serve_with_client_memory: Callable[..., Any], tmp_path: Path
) -> None:
    add_model(tmp_path, "known", 'parameters { key: "contact" value { string_value: "me" } }')
    add_model(tmp_path, "unknown")
    with serve_with_client_memory(tmp_path, {"PYTHONPATH": str(site)}) as (http, _, metrics):
        assert fetch(http, "/site/v1/contact") == {"contact": "the night shift"}
        paths = fetch(http, "/openapi.json")["paths"]
        route = paths["/site/v1/contact"]["get"]
        assert (route["summary"], route["tags"]) == ("Whom to call", ["metadata"])
        assert "\nsite_contact_requests 1" in fetch(metrics, "/metrics")
        index = {item["name"]: item for item in fetch(http, "/edge/v1/versions")["versions"]}
        assert index["known"]["state"] == "READY"
        status = run(site, "status", f"--url={http}")
    assert "site: asked 1 times for the contact" in status.stdout.splitlines()
    assert "FAILED unknown version 1: parameter 'contact' is missing" in status.stdout.splitlines()
    assert run(site, "contact").stdout == "call the night shift\n"
    checked = run(site, "check", str(tmp_path))
    assert checked.returncode == 1
    assert "parameter 'contact' is missing" in checked.stderr
    assert "plugin 'absent' (no_such_module:PLUGIN) cannot be imported: ModuleNotFoundError" in checked.stderr
    assert run(site, "check", str(tmp_path), "--site-needs-contact=false").returncode == 0
    wrong = run(site, "check", str(tmp_path), "--site-need-contact=false")
    assert (wrong.returncode, "did you mean '--site-needs-contact'?" in wrong.stderr) == (78, True)
    assert "  contact   print whom to call" in run(site, "--help").stdout.splitlines()


@pytest.mark.parametrize("is_required", [False, True])
def test_a_failing_plugin_does_not_disturb_others(
    run: Callable[..., Any], serve_with_client_memory: Callable[..., Any], tmp_path: Path, is_required: bool
) -> None:
    text = FAILING.format(error="KeyError('oops')", is_required=is_required)
    install(tmp_path / "site", "failing_rules", {"plugin.py": text}, "failing = failing_rules.plugin:PLUGIN")
    add_model(tmp_path / "models", "m")
    with serve_with_client_memory(tmp_path / "models", {"PYTHONPATH": str(tmp_path / "site")}) as (http, _, _):
        body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [2.0]}]}).encode()
        request = urllib.request.Request(f"http://{http}/v2/models/m/infer", body)
        with urllib.request.urlopen(request, timeout=20) as reply:
            assert json.load(reply)["outputs"][0]["data"] == [2.0]
        status = run(tmp_path / "site", "status", f"--url={http}")
    assert status.returncode == 1
    assert "FAILED plugin failing: KeyError: 'oops'" in status.stdout.splitlines()
    assert ("is NOT ready" in status.stdout) is is_required
    checked = run(tmp_path / "site", "check", str(tmp_path / "models"))
    assert (checked.returncode, "FAILED plugin failing: KeyError: 'oops'" in checked.stderr) == (1, True)


@pytest.mark.parametrize(
    ("error", "code"), [("ConfigError('the site is closed')", 78), ("ServingFault('the site is closed')", 2)]
)
def test_an_invalid_setting_or_machine_ends_the_start(
    run: Callable[..., Any], tmp_path: Path, error: str, code: int
) -> None:
    text = FAILING.format(error=error, is_required=False)
    install(tmp_path / "site", "failing_rules", {"plugin.py": text}, "failing = failing_rules.plugin:PLUGIN")
    (tmp_path / "models").mkdir()
    done = run(
        tmp_path / "site", "serve", f"--model-repository={tmp_path / 'models'}", "--http-port=0", "--grpc-port=0"
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (code, "edge-server serve: the site is closed")


MACHINE = """
from pathlib import Path

from edge_server.core.finding import Finding, FindingLevel
from edge_server.plugin import Plugin


class ArmPlugin(Plugin):
    name = "arm"
    machine_checks = ("arm.plugin:check_motors",)
    machine_facts = {"arm": "arm.plugin:ask_motors"}


def check_motors(root: Path):
    count = len(list((root / "dev").glob("motor*")))
    return [Finding("arm", "motors", f"{count} of 6", FindingLevel.PROBLEM, "plug in the arm")]


def ask_motors():
    return {"firmware": "1.2"}


PLUGIN = ArmPlugin()
"""


def test_a_plugin_adds_a_check_to_the_doctor_and_its_drivers_answer_to_the_archive(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    install(tmp_path / "site", "arm", {"plugin.py": MACHINE}, "arm = arm.plugin:PLUGIN")
    (tmp_path / "board/dev").mkdir(parents=True)
    (tmp_path / "board/dev/motor0").touch()
    board = f"--sysfs-root={tmp_path / 'board'}"
    done = run(tmp_path / "site", "doctor", "--skip-runtimes", "--json", board)
    found = json.loads(done.stdout)
    told = {"name": "motors", "text": "1 of 6", "level": "problem", "advice": "plug in the arm"}
    assert (done.returncode, found["can_serve"], found["sections"]["arm"]) == (1, False, [told])
    assert run(tmp_path / "site", "doctor", f"--collect={tmp_path / 'a.tar.gz'}", board).returncode == 0
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        about = json.load(archive.extractfile("board.json"))  # type: ignore[arg-type]
    assert about["arm"] == {"firmware": "1.2"}
    assert {"cuda", "nvml"} <= about.keys()
