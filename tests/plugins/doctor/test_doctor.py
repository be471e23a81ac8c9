"""Doctor on reconstructed boards, with runtimes that work, are missing, or crash."""

from __future__ import annotations

import grp
import json
import os
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from edge_server.backends.cuda import cuda_driver
from edge_server.core.finding import Finding, FindingLevel
from edge_server.errors import install_hint
from edge_server.plugins.doctor import command as doctor
from edge_server.plugins.doctor import sample_model
from edge_server.plugins.doctor.command import can_serve
from edge_server.plugins.doctor.machine import check_board, installed_packages
from edge_server.plugins.doctor.permissions import ServerUser, check_permissions, find_user
from edge_server.plugins.doctor.ports import check_ports
from edge_server.plugins.doctor.runtimes import check_runtimes, run_probe
from edge_server.plugins.governor.machine_check import check_machine, findings_of
from edge_server.plugins.governor.readings import Gpu, MachineReading
from edge_server.telemetry.sysfs import SysfsFiles

ROOT = Path(__file__).parents[3]
COMMAND = Path(sys.executable).parent / "edge-server"


def ask(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [str(COMMAND), "doctor", "--json", *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def named(findings: list[Finding], name: str) -> Finding:
    (found,) = [item for item in findings if item.name == name]
    return found


@pytest.mark.parametrize(
    ("name", "board", "release"),
    [
        ("orin_nano_jp6", "Orin Nano", "JetPack 6"),
        ("agx_orin_jp6", "AGX Orin", "JetPack 6"),
        ("thor_jp7", "Thor", "JetPack 7"),
    ],
)
def test_the_doctor_reports_board_jetpack_and_sensors(make_board: Any, name: str, board: str, release: str) -> None:
    box = make_board(name)
    code, found = ask(f"--sysfs-root={box.root}", "--skip-runtimes")
    sections = found["sections"]
    assert board in sections["board"][0]["text"]
    assert sections["jetpack"][0]["text"].startswith(release)
    assert any(item["name"] == "heat" and "°C (tj)" in item["text"] for item in sections["sensors"])
    assert any(item["name"] == "power" and " W" in item["text"] for item in sections["sensors"])
    assert any(item["name"] == "power mode" for item in sections["sensors"])
    # A board of files has no devices: the problem is reported with advice, and models are served without CUDA.
    (missing,) = sections["permissions"][:1]
    assert (missing["name"], missing["level"]) == ("/dev/nvmap", "warning")
    assert "--runtime=nvidia" in missing["advice"]
    assert (code, found["can_serve"]) == (0, True)


def test_an_x86_machine_has_no_section_about_jetpack(make_board: Any) -> None:
    _, found = ask(f"--sysfs-root={make_board('x86_box').root}", "--skip-runtimes")
    assert "jetpack" not in found["sections"]
    assert any(item["name"] == "heat" and "°C" in item["text"] for item in found["sections"]["sensors"])


def test_the_text_report_ends_with_the_verdict(make_board: Any) -> None:
    done = subprocess.run(
        [str(COMMAND), "doctor", "--skip-runtimes", f"--sysfs-root={make_board('thor_jp7').root}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    at = next(index for index, line in enumerate(lines) if "/dev/nvmap" in line)
    assert lines[at].startswith("!")
    assert lines[at + 1].lstrip().startswith("-> ")
    assert lines[-1].startswith("This machine can serve; ")


@pytest.mark.full
def test_installed_runtimes_are_run_and_the_fastest_is_named() -> None:
    findings = list(check_runtimes({}, is_jetson=False))
    assert f"onnxruntime {onnxruntime.__version__} on CPU, f32" in named(findings, "onnxruntime").text
    assert named(findings, "openvino").text.startswith("openvino ")
    fastest = named(findings, "fastest").text
    assert fastest.startswith(("openvino: ", "onnxruntime: "))
    assert "onnxruntime " in fastest
    assert "openvino " in fastest
    assert can_serve(findings)


def test_the_doctor_builds_an_engine_and_runs_it(
    fake_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in fake_gpu.environment(tmp_path, TMPDIR=str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    answer = dict(run_probe("tensorrt_rtx"))
    assert answer.pop("ms", None), answer
    assert (answer.pop("runtime").split()[0], answer) == ("tensorrt_rtx", {"device": "GPU:0", "precision": "f32"})


def test_a_tensorrt_that_the_driver_is_too_old_for_does_not_work(
    fake_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(Path(fake_gpu.library).parent))
    monkeypatch.setenv("FAKE_CUDA_VERSION", "12020")
    assert "the driver is older than the CUDA of the library" in run_probe("tensorrt_rtx")["sample_problem"]


@pytest.mark.full
def test_without_a_gpu_tensorrt_is_not_said_to_work() -> None:
    pytest.importorskip("tensorrt_rtx")
    if cuda_driver.unavailable_reason() == "":
        pytest.skip("this machine has a GPU")
    assert run_probe("tensorrt_rtx")["sample_problem"].startswith("it needs a GPU: there is no NVIDIA driver")


Answers = Mapping[str, Mapping[str, Any]]


def prober(**answers: Mapping[str, Any]) -> Callable[[str], Mapping[str, Any]]:
    missing = {"problem": "runtime does not import; install it with: pip install it"}
    return lambda name: answers.get(name, missing)


def test_without_a_runtime_the_advice_names_what_to_install() -> None:
    findings = list(check_runtimes({}, is_jetson=False, probe=prober()))
    assert not can_serve(findings)
    assert "pip install" in named(findings, "all").advice
    assert all("pip install" in item.text for item in findings if item.name != "all")


def test_two_distributions_of_onnx_runtime_are_reported_by_their_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> list[Finding]:
        works = prober(**{name: {} for name in ("onnxruntime", "openvino")})
        return [item for item in check_runtimes({}, is_jetson=False, probe=works) if "overwrite" in item.text]

    assert told() == []
    info = tmp_path / "onnxruntime_gpu-1.23.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.23.0\n")
    (info / "top_level.txt").write_text("onnxruntime\n")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = told()
    assert found.text.startswith("onnxruntime and onnxruntime-gpu are installed")
    assert (found.level, "pip uninstall onnxruntime onnxruntime-gpu" in found.advice) == (FindingLevel.WARNING, True)


def test_a_runtime_that_crashes_does_not_end_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "onnxruntime"
    package.mkdir()
    # As a wheel does that was built for a processor with other instructions.
    (package / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    monkeypatch.syspath_prepend(tmp_path)
    answer = run_probe("onnxruntime")
    assert answer == {"problem": "it ended its process with SIGILL", "is_broken": True}
    findings = list(check_runtimes({}, is_jetson=False, probe=prober(onnxruntime=answer, openvino={"runtime": "o"})))
    found = named(findings, "onnxruntime")
    assert (found.level, can_serve(findings)) == (FindingLevel.WARNING, True)
    assert "another processor" in found.advice


def test_a_runtime_that_prints_on_import_does_not_corrupt_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "openvino").mkdir()
    (tmp_path / "openvino/__init__.py").write_text("import os\nprint('welcome')\nos.write(1, b'welcome')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "does not import" in run_probe("openvino")["problem"]


@pytest.mark.parametrize(
    ("installed", "message"),
    [({"python3-libnvinfer": "10.3.0.30"}, "--system-site-packages"), ({}, "apt-get install python3-libnvinfer")],
)
def test_on_a_jetson_the_report_says_how_to_install_tensorrt(installed: dict[str, str], message: str) -> None:
    answer = {"problem": "runtime tensorrt does not import"}
    from edge_server.plugins.doctor.runtimes import _finding

    found = _finding("tensorrt", answer, installed, is_jetson=True)
    assert (found.level, message in found.advice) == (FindingLevel.WARNING, True)
    assert _finding("tensorrt", answer, {}, is_jetson=False).level is FindingLevel.NOTE


def test_nvidia_packages_are_those_installed_according_to_dpkg(tmp_path: Path) -> None:
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text(
        "Package: nvidia-l4t-core\nStatus: install ok installed\nVersion: 36.4.3-2025\n\n"
        "Package: python3-libnvinfer\nStatus: deinstall ok config-files\nVersion: 10.3\n\n"
        "Package: vim\nStatus: install ok installed\nVersion: 9\n\n"
        "Package: libnvinfer10\nStatus: install ok installed\nVersion: 10.3.0.30\n"
    )
    assert installed_packages(SysfsFiles(tmp_path)) == {"nvidia-l4t-core": "36.4.3-2025", "libnvinfer10": "10.3.0.30"}


@pytest.mark.parametrize(
    ("reading", "level", "message"),
    [
        (
            MachineReading(0, soc="tegra234", missing={"l4t": "no release"}),
            FindingLevel.WARNING,
            "/etc/nv_tegra_release",
        ),
        (MachineReading(0, soc="tegra234", l4t="35.4.1", jetpack="5.1.2"), FindingLevel.WARNING, "JetPack 6 or 7"),
        (MachineReading(0, soc="tegra264", l4t="41.0"), FindingLevel.NOTE, "newer"),
        (MachineReading(0, soc="tegra234", l4t="36.4.3", jetpack="6.2"), FindingLevel.OK, ""),
    ],
)
def test_each_kind_of_jetpack_has_its_advice(
    tmp_path: Path, reading: MachineReading, level: FindingLevel, message: str
) -> None:
    found = named(list(findings_of(reading, tmp_path)), "release")
    assert (found.level, message in found.advice) == (level, True)


def meminfo(tmp_path: Path, available_mib: int) -> list[Finding]:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 8000000 kB\nMemAvailable: {available_mib * 1024} kB\n")
    return list(check_machine(tmp_path))


@pytest.mark.parametrize(
    ("available_mib", "level"), [(4000, FindingLevel.OK), (400, FindingLevel.WARNING), (100, FindingLevel.PROBLEM)]
)
def test_low_memory_is_a_warning_and_too_little_a_failure(
    tmp_path: Path, available_mib: int, level: FindingLevel
) -> None:
    findings = meminfo(tmp_path, available_mib)
    assert named(findings, "available").level is level
    assert f"{available_mib} of " in named(findings, "available").text
    assert can_serve(findings) == (level is not FindingLevel.PROBLEM)


def test_memory_and_cores_are_those_of_the_control_group(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    for controller, files in {
        "memory": {"memory.limit_in_bytes": 300 << 20, "memory.usage_in_bytes": 100 << 20},
        "cpu": {"cpu.cfs_quota_us": 50_000, "cpu.cfs_period_us": 100_000},
    }.items():
        (group / controller).mkdir(parents=True)
        for name, value in files.items():
            (group / controller / name).write_text(f"{value}\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/\n3:cpu:/\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 24000000 kB\nMemAvailable: 23000000 kB\n")
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\nmodel name : X\n\nprocessor : 1\nmodel name : X\n")
    memory = named(list(check_machine(tmp_path)), "available")
    assert memory.text.startswith("200 MiB available within the limit of this control group; of the machine, 22460 of ")
    assert memory.level is FindingLevel.WARNING
    processor = named(list(check_board(SysfsFiles(tmp_path))), "processor")
    assert processor.text == "X, 2 cores, of which this control group may use 0.5"


@pytest.mark.parametrize("has_service", [True, False])
def test_energy_counters_are_opened_to_the_group_of_the_service_or_of_the_user_by_a_file_that_no_package_has(
    has_service: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = grp.getgrgid(os.getegid()).gr_name
    if has_service:
        monkeypatch.setattr(grp, "getgrnam", lambda name: types.SimpleNamespace(gr_name=name))
    why = "/sys/class/powercap/intel-rapl:1/energy_uj may not be read by this user"
    found = named(list(findings_of(MachineReading(0, missing={"rails": why}), Path("/"))), "power")
    line = f"'z /sys/class/powercap/intel-rapl:1/energy_uj 0440 root {'edge' if has_service else own} -'"
    assert f"echo {line} | sudo tee /etc/tmpfiles.d/edge-server-energy.conf && " in found.advice
    # The name that the comment in the packages' own file and the guide have.
    for other in ("systemd/tmpfiles.conf", "docs/operations.md"):
        assert "/etc/tmpfiles.d/edge-server-energy.conf" in (ROOT / other).read_text("utf-8")


def test_a_machine_without_energy_counters_is_not_told_to_open_them() -> None:
    why = "no RAPL domain is to be found under /sys/class/powercap (yet)"
    assert not named(list(findings_of(MachineReading(0, missing={"rails": why}), Path("/"))), "power").advice


def test_a_lost_gpu_is_a_failure_and_a_replaced_driver_needs_a_restart() -> None:
    lost = MachineReading(0, gpus=(Gpu("gpu0", name="NVIDIA A2", is_lost=True),))
    assert "restart the machine" in named(list(findings_of(lost, Path("/"))), "NVIDIA A2").advice
    assert not can_serve(list(findings_of(lost, Path("/"))))
    replaced = MachineReading(0, missing={"nvml": "NVML: Driver/library version mismatch"})
    found = named(list(findings_of(replaced, Path("/"))), "nvml")
    assert (found.level, "restart the machine" in found.advice) == (FindingLevel.WARNING, True)


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """Devices as JetPack makes them: nvmap for root and video, the render node for root and render."""
    group = grp.getgrnam("video").gr_gid
    for path, mode, gid in (
        ("dev/nvmap", 0o440, 0),
        ("dev/dri/renderD128", 0o660, group),
        ("dev/nvhost-gpu", 0o666, 0),
    ):
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"")
        target.chmod(mode)
        if os.geteuid() == 0:
            os.chown(target, 0, gid)
        elif gid:
            pytest.skip("needs root, to give files to groups")
    return tmp_path


def test_inaccessible_devices_are_named_with_the_group_that_may_open_them(devices: Path) -> None:
    stranger = ServerUser("edge", 12345, frozenset({12345}), is_me=False)
    findings = list(check_permissions(SysfsFiles(devices), devices, stranger, is_jetson=True))
    assert named(findings, "devices").text == "user edge may open 1 of 3 GPU devices"
    assert "usermod --append --groups video edge" in named(findings, "/dev/dri/renderD128").advice
    assert "udev.rules" in named(findings, "/dev/nvmap").advice
    member = ServerUser("edge", 12345, frozenset({12345, grp.getgrnam("video").gr_gid}), is_me=False)
    findings = list(check_permissions(SysfsFiles(devices), devices, member, is_jetson=True))
    assert {item.name for item in findings} == {"devices", "/dev/nvmap"}
    assert can_serve(findings)


def test_users_are_looked_up_by_name_and_an_unknown_name_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_user("nobody").name == "nobody"
    assert find_user("").is_me
    with pytest.raises(SystemExit) as caught:
        doctor.run(["--user=nobody-of-this-name"])
    assert caught.value.code == 2
    assert "nobody-of-this-name" in capsys.readouterr().err


def test_a_used_port_is_reported_with_its_process_and_the_option_to_change_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (found,) = check_ports({"metrics": taken.getsockname()[1]})
    assert "in use by" in found.text
    assert f"(process {os.getpid()})" in found.text
    assert (found.level, "--metrics-port" in found.advice) == (FindingLevel.NOTE, True)


def test_an_unused_port_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (found,) = check_ports({"HTTP": port})
    assert (found.text, found.level) == ("HTTP: free", FindingLevel.OK)


LISTENS = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("words", [["edge-server", "serve", "--http-port=0"], ["-m", "edge_server", "serve"]])
def test_a_port_of_a_running_edge_server_is_no_problem(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "edge-server").write_text(LISTENS)
    (tmp_path / "edge_server.py").write_text(LISTENS)
    with subprocess.Popen(
        [sys.executable, *words], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        (found,) = check_ports({"HTTP": int(server.stdout.readline())})
        server.communicate()
    assert found.text == f"HTTP: in use by edge-server (process {server.pid})"
    assert (found.level, found.advice) == (FindingLevel.OK, "")


def test_every_problem_has_advice() -> None:
    with pytest.raises(ValueError, match="without advice"):
        Finding("memory", "available", "little", FindingLevel.WARNING)


def test_text_of_the_machine_cannot_control_the_terminal(make_board: Any, capsys: pytest.CaptureFixture[str]) -> None:
    box = make_board("orin_nano_jp6")
    box.write("/proc/device-tree/model", b"evil\x1b[2J board\0")
    doctor.run(["--skip-runtimes", f"--sysfs-root={box.root}"])
    out = capsys.readouterr().out
    assert "evil" in out
    assert "\x1b" not in out


def test_the_sample_model_is_valid_onnx() -> None:
    data = sample_model.sample_model()
    assert data == sample_model.sample_model()
    model = onnx.load_from_string(data)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    image = np.ones(sample_model.INPUT_SHAPE, np.float32)
    (scores,) = session.run([sample_model.OUTPUT], {sample_model.INPUT: image})
    assert scores.shape == sample_model.OUTPUT_SHAPE
    assert np.isfinite(scores).all()
    assert scores.std() > 0


def test_runtimes_whose_libraries_are_absent_share_one_line() -> None:
    absent = {
        name: {"problem": f"runtime {name} does not import (ModuleNotFoundError: No module); {install_hint(extra)}"}
        for name, extra in {"pytorch": "pytorch", "tensorrt": "tensorrt"}.items()
    }
    findings = {item.name: item for item in check_runtimes({}, is_jetson=False, probe=prober(**absent))}
    assert findings["not installed"].text == "pytorch, tensorrt"
    assert findings["not installed"].advice.endswith("extras pytorch, tensorrt")
    assert "pytorch" not in findings
    on_jetson = {item.name: item for item in check_runtimes({}, is_jetson=True, probe=prober(**absent))}
    assert "python3-libnvinfer" in on_jetson["tensorrt"].advice
