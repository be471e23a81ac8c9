"""Scenario inside the booted machine: publishes versions, updates by apt, and records the results."""

import json
import os
import re
import subprocess
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path

SITE, WAITING, HOME = Path("/site/stable"), Path("/waiting"), Path("/opt/edge_server")
MODELS = Path("/var/lib/edge_server/models")
VERSIONS = ("1.1", "1.2", "1.3", "1.4", "1.5", "1.6", "1.7")
GOOD = ("1.1", "1.7")
KEY, OTHER_KEY = "packages@example.com", "thief@example.com"
BEGAN = time.monotonic()
found: dict = {}
os.environ["DEBIAN_FRONTEND"] = "noninteractive"
os.environ["GNUPGHOME"] = "/gnupg"


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False)


def must(*words: str) -> str:
    done = run(*words)
    assert done.returncode == 0, f"{words}: {done.stdout}"
    return done.stdout


def is_serving() -> bool:
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 2], "data": [4, 2]}
    data = json.dumps({"inputs": [tensor]}).encode()
    try:
        urllib.request.urlopen("http://127.0.0.1:8000/v2/models/same/infer", data, timeout=5)
    except (OSError, urllib.error.HTTPError):
        return False
    return True


def eventually(condition, timeout_s: float = 40.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def current() -> str:
    return os.readlink(HOME / "current").rpartition("/")[2]


def text_of(name: str) -> str:
    path = HOME / name
    return path.read_text().strip() if path.exists() else ""


def journal() -> str:
    must("journalctl", "--sync")
    return must("journalctl", "--output=cat", "--unit=edge-server.service", "--unit=edge-server-accept.service")


def publish(*names: str, key: str = KEY) -> None:
    for name in names:
        for package in WAITING.glob(name):
            package.rename(SITE / package.name)
    must("/publish_apt.sh", "--key", key, str(SITE))


def apt(*words: str) -> subprocess.CompletedProcess:
    return run("apt-get", "--yes", *words)


def prepare() -> None:
    os.mkdir("/gnupg", 0o700)
    for key in (KEY, OTHER_KEY):
        must("gpg", "--batch", "--quiet", "--passphrase", "", "--quick-generate-key", key, "ed25519", "sign", "never")
    publish("edge-server-*.deb", "edge-server_1.0.deb")
    for path in Path("/etc/apt/sources.list.d").iterdir():
        path.unlink()
    Path("/etc/apt/sources.list").write_text("")
    # The index of man pages takes seconds at each update.
    Path("/var/lib/man-db/auto-update").unlink(missing_ok=True)
    must("install", "-D", "-m", "644", str(SITE / "edge-server.gpg"), "/etc/apt/keyrings/edge-server.gpg")
    Path("/etc/apt/sources.list.d/edge-server.list").write_text(
        "deb [signed-by=/etc/apt/keyrings/edge-server.gpg] http://127.0.0.1:8080/stable ./\n"
    )
    Path("/etc/apt/apt.conf.d/99direct").write_text('Acquire::http::Proxy::127.0.0.1 "DIRECT";\n')
    subprocess.Popen(["python3", "-m", "http.server", "--directory", "/site", "--bind", "127.0.0.1", "8080"])
    assert eventually(lambda: run("curl", "-sf", "http://127.0.0.1:8080/stable/InRelease").returncode == 0)


def install() -> None:
    updated = apt("update")
    assert updated.returncode == 0, updated.stdout
    done = apt("install", "edge-server")
    assert done.returncode == 0, done.stdout
    must("cp", "-r", "/seed/same", str(MODELS))
    must("systemctl", "restart", "edge-server")
    Path("/etc/edge_server/config.toml").write_text('[log]\nformat = "text"\n')
    found["install"] = {"code": done.returncode, "current": current(), "served": eventually(is_serving)}


def update() -> None:
    for version in VERSIONS:
        Path("/results/reached").write_text(f"update {version} after {time.monotonic() - BEGAN:.0f} s")
        publish(f"edge-server_{version}.deb")
        must("apt-get", "update")
        if version == VERSIONS[0]:
            found["downloads"] = re.findall(r"'(http\S+)'", must("apt-get", "--print-uris", "--yes", "upgrade"))
        done = apt("upgrade")
        status = run("edge-server", "status")
        if version in GOOD:
            is_over = eventually(lambda: not text_of("trial"))
        else:
            is_over = eventually(lambda wanted=version: text_of("failed").startswith(wanted + " "))
            eventually(lambda: current() == GOOD[0] and not text_of("trial"))
            # The version that was taken back may still be ending.
            eventually(lambda: program_of(server_pid()) == GOOD[0] and is_serving())
            status = run("edge-server", "status")
        found[version] = {
            "code": done.returncode, "output": done.stdout, "over": is_over,
            "status": " ".join(status.stdout.split()), "status_code": status.returncode,
            "current": current(), "failed": text_of("failed"), "served": eventually(is_serving),
        }  # fmt: skip


def server_pid() -> str:
    return must("systemctl", "show", "--property=MainPID", "--value", "edge-server").strip()


def program_of(pid: str) -> str:
    """Return the version that a process runs."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_text()
    except OSError:
        return ""
    seen = re.search(r"versions/([^/]+)/bin", environment)
    return seen[1] if seen else ""


def later_crash() -> None:
    must("systemctl", "kill", "--signal=KILL", "edge-server")
    time.sleep(0.5)
    found["later_crash"] = {"served": eventually(is_serving), "current": current()}
    found["kept"] = {
        "model": (MODELS / "same/config.pbtxt").exists(),
        "config": Path("/etc/edge_server/config.toml").read_text(),
    }


def refuse() -> None:
    package = SITE / "edge-server_1.7.deb"
    version = SITE / "edge-server_1.8.deb"
    must("sh", "-ec", f"dpkg-deb -R {package} /spoiled; sed -i 's/^Version: .*/Version: 1.8/' /spoiled/DEBIAN/control")
    must("dpkg-deb", "--build", "/spoiled", str(version))
    publish()
    data = bytearray(version.read_bytes())
    data[-100] ^= 1
    version.write_bytes(data)
    must("apt-get", "update")
    done = apt("upgrade")
    found["damaged"] = {"code": done.returncode, "output": done.stdout, "current": current()}
    publish(key=OTHER_KEY)
    updated = apt("update")
    apt("upgrade")
    found["other_key"] = {"output": updated.stdout, "current": current()}


def remove() -> None:
    apt("remove", "edge-server", "edge-server-runtimes", "edge-server-models")
    found["removed"] = {
        "program": not HOME.exists(),
        "model": (MODELS / "same/config.pbtxt").exists(),
        "config": Path("/etc/edge_server/config.toml").exists(),
    }


def main() -> None:
    for step in (prepare, install, update, later_crash, refuse, remove):
        Path("/results/reached").write_text(step.__name__)
        try:
            step()
        except Exception:  # noqa: BLE001 - every error is reported to the test outside
            # What follows needs what went before.
            found["error"] = f"{step.__name__}: {traceback.format_exc()}"
            break


try:
    main()
finally:
    try:
        found["journal"] = journal()
    finally:
        Path("/results/results.json").write_text(json.dumps(found))
