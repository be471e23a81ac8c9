"""ROS 2 package for colcon: its content, and the agreement of its files."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import edge_server
from edge_server.plugins.ros.bridge_parameters import BridgeParameters
from edge_server.protocol.frame_messages import Delivery

ROOT = Path(edge_server.__file__).parent
PACKAGE = ROOT / "plugins" / "ros" / "ros2_package" / "edge_server_ros"
COLCON = os.environ.get("EDGE_TEST_COLCON", "")

needs_colcon = pytest.mark.skipif(
    not COLCON,
    reason='EDGE_TEST_COLCON names no colcon; get one with: eval "$(tests/plugins/ros/fetch_colcon.sh DEST)"',
)


def constant(path: Path, name: str) -> Any:
    """Return a constant of a file that cannot be imported here."""
    return next(
        ast.literal_eval(statement.value)
        for statement in ast.parse(path.read_text()).body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        and ast.unparse(statement.targets[0] if isinstance(statement, ast.Assign) else statement.target) == name
        and statement.value is not None
    )


DEFAULTS = constant(PACKAGE / "edge_server_ros" / "node.py", "DEFAULTS")


def yaml_parameters() -> dict[str, Any]:
    """Read params.yaml, of which this file needs one `name: value  # remark` a line."""
    words = {"true": True, "false": False, '""': ""}
    found: dict[str, Any] = {}
    for line in (PACKAGE / "config" / "params.yaml").read_text().splitlines():
        match = re.fullmatch(r" {4}(\w+): (\S+)(?: +#.*)?", line)
        if match:
            name, text = match.groups()
            is_number = re.fullmatch(r"[\d.]+", text) and text.count(".") < 2
            found[name] = words.get(text, ast.literal_eval(text) if is_number else text)
    return found


def test_the_parameter_file_lists_every_parameter_with_its_default() -> None:
    assert yaml_parameters() == DEFAULTS
    assert {name: type(value) for name, value in yaml_parameters().items()} == {
        name: type(value) for name, value in DEFAULTS.items()
    }


def test_the_node_has_a_parameter_for_every_bridge_option() -> None:
    told = {field.name for field in dataclasses.fields(BridgeParameters)} - {"delivery"}
    # Notices of drops have no topic to go to.
    limits = {field.name for field in dataclasses.fields(Delivery)} - {"notifies_drops"}
    assert set(DEFAULTS) == told | limits | {"server_address", "server_http_url", "diagnostics_topic", "autostart"}


def test_the_manifest_names_the_files_that_the_build_reads() -> None:
    manifest = ElementTree.parse(PACKAGE / "package.xml").getroot()
    assert manifest.attrib["format"] == "3"
    assert manifest.findtext("name") == PACKAGE.name == "edge_server_ros"
    assert manifest.findtext("export/build_type") == "ament_python"
    assert manifest.findtext("license") == "Apache-2.0"
    assert manifest.findtext("version") == edge_server.__version__
    assert f'version="{edge_server.__version__}"' in (PACKAGE / "setup.py").read_text()
    assert (PACKAGE / "resource" / "edge_server_ros").is_file()


def test_the_manifest_depends_on_every_ros_package_that_is_imported() -> None:
    manifest = ElementTree.parse(PACKAGE / "package.xml").getroot()
    known = {element.text for element in manifest.findall("exec_depend")}
    # By name, in edge_server.plugins.ros.transports.rclpy_transport and model_service.
    imported = {"sensor_msgs", "vision_msgs", "diagnostic_msgs", "edge_server_interfaces"}
    for path in [*PACKAGE.glob("edge_server_ros/*.py"), *PACKAGE.glob("launch/*.py")]:
        for found in ast.walk(ast.parse(path.read_text())):
            names = [found.module or ""] if isinstance(found, ast.ImportFrom) else []
            names += [alias.name for alias in found.names] if isinstance(found, ast.Import) else []
            imported |= {name.partition(".")[0] for name in names}
    assert imported - sys.stdlib_module_names - {"edge_server"} <= known


def test_the_launch_file_starts_the_nodes_program_and_gives_known_parameters() -> None:
    text = (PACKAGE / "launch" / "edge_server.launch.py").read_text()
    program = re.search(r'console_scripts": \[f"(\w+) =', (PACKAGE / "setup.py").read_text())
    assert program is not None
    assert f'executable="{program[1]}"' in text
    arguments = constant(PACKAGE / "launch" / "edge_server.launch.py", "ARGUMENTS")
    assert {name: default for name, (default, _) in arguments.items()}.items() <= DEFAULTS.items()


@pytest.mark.full
@pytest.mark.skipif(not (ROOT.parent / "pyproject.toml").exists(), reason="edge_server is installed, not a checkout")
def test_every_file_of_the_package_is_installed_with_edge_server(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT, tmp_path / "source" / "edge_server", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT.parent / name, tmp_path / "source")
    command = [sys.executable, "-c", "import setuptools; setuptools.setup()", "build_py", "--build-lib=built"]
    done = subprocess.run(
        command, cwd=tmp_path / "source", capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    below = PACKAGE.relative_to(ROOT.parent)
    built = tmp_path / "source" / "built" / below
    assert files_of(built) == files_of(tmp_path / "source" / below)
    assert "package.xml" in files_of(built)


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.full
@needs_colcon
def test_colcon_finds_the_package_in_the_repository(tmp_path: Path) -> None:
    listed = colcon("list", "--base-paths", str(ROOT), folder=tmp_path)
    assert re.search(r"^edge_server_ros\t.*\(ros\.ament_python\)$", listed, re.MULTILINE), listed


@pytest.mark.full
@needs_colcon
def test_colcon_builds_and_installs_the_package(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "src" / "edge_server_ros", ignore=ignored)
    colcon("build", folder=tmp_path)
    installed = tmp_path / "install" / "edge_server_ros"
    for name in (
        "lib/edge_server_ros/edge_server_node",
        "share/edge_server_ros/package.xml",
        "share/edge_server_ros/launch/edge_server.launch.py",
        "share/edge_server_ros/config/params.yaml",
        "share/ament_index/resource_index/packages/edge_server_ros",
    ):
        assert (installed / name).is_file(), name
    assert len(list(installed.glob("lib/python3*/site-packages/edge_server_ros/node.py"))) == 1


def colcon(*words: str, folder: Path) -> str:
    """Run colcon in a folder of its own and return what it prints."""
    done = subprocess.run(
        [COLCON, "--log-base", str(folder / "log"), *words],
        cwd=folder, capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "COLCON_HOME": str(folder / "home")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
