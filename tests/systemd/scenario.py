"""Scenario inside the booted machine: operates the service and records the results."""

import json
import os
import signal
import ssl
import subprocess
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path

NAME = "edge-server.service"
DROP_INS = Path("/etc/systemd/system/edge-server.service.d")
found: dict = {}


def systemctl(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["systemctl", *words, NAME], capture_output=True, text=True, timeout=60, check=False)


def show(*names: str) -> dict:
    lines = systemctl("show", *(f"--property={name}" for name in names)).stdout.splitlines()
    return dict(line.split("=", 1) for line in lines)


def ask(path: str, body: dict | None = None, *, scheme: str = "http", timeout_s: float = 20) -> tuple:
    data = None if body is None else json.dumps(body).encode()
    context = ssl._create_unverified_context() if scheme == "https" else None
    try:
        with urllib.request.urlopen(
            f"{scheme}://127.0.0.1:8000{path}", data, timeout=timeout_s, context=context
        ) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def eventually(condition, timeout_s: float = 90.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def journal() -> str:
    subprocess.run(["journalctl", "--sync"], check=False)
    return subprocess.run(["journalctl", "--unit", NAME, "--output=cat"], capture_output=True, text=True).stdout


def infer(model: str, timeout_s: float = 20) -> tuple:
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 2], "data": [4, 2]}
    return ask(f"/v2/models/{model}/infer", {"inputs": [tensor]}, timeout_s=timeout_s)


def start_and_serve() -> None:
    found["enabled"] = systemctl("is-enabled").stdout.strip()
    found["start"] = systemctl("start").returncode
    assert found["start"] == 0, systemctl("status").stdout
    found["after_start"] = show("ActiveState", "Type", "StatusText", "WatchdogUSec", "NRestarts", "User")
    pid = int(show("MainPID")["MainPID"])
    found["groups"] = Path(f"/proc/{pid}/status").read_text().split("Groups:")[1].splitlines()[0].split()
    found["uid_is_edge"] = os.stat(f"/proc/{pid}").st_uid == int(subprocess.getoutput("id -u edge"))
    found["ready"] = ask("/v2/health/ready")[0]
    found["infer"] = infer("same")
    found["models_mode"] = oct(os.stat("/var/lib/edge_server/models").st_mode & 0o7777)
    found["runtime_mode"] = oct(os.stat("/run/edge_server").st_mode & 0o7777)


def after_a_reload() -> dict:
    """systemctl returns when the signal is sent; the service is `reloading` until the server says that it is done."""
    eventually(lambda: show("ActiveState")["ActiveState"] != "reloading")
    return show("ActiveState", "NRestarts")


def reload() -> None:
    with open("/etc/edge_server/config.toml", "a") as file:
        file.write('\n[log]\nformat = "text"\n[http]\nport = 8123\n')
    found["reload"] = systemctl("reload").returncode
    found["after_reload"] = after_a_reload()
    found["log_format"] = json.loads(ask("/v2/logging")[1]).get("log_format")
    found["reload_journal"] = journal()
    with open("/etc/edge_server/config.toml", "a") as file:
        file.write("nonsense\n")
    systemctl("reload")
    found["after_bad_reload"] = after_a_reload()
    Path("/etc/edge_server/config.toml").write_text("")


def hang() -> None:
    """A model that hangs in its runtime: only the watchdog ends that."""
    before = show("MainPID", "NRestarts")
    found["hang_asked"] = infer("hangs", timeout_s=1)[0]
    found["restarted"] = eventually(lambda: show("NRestarts")["NRestarts"] != before["NRestarts"])
    found["served_again"] = eventually(lambda: infer("same")[0] == 200)
    found["after_hang"] = {**show("MainPID", "NRestarts"), "before": before}
    found["hang_journal"] = journal()


def stop_process() -> None:
    """A stopped process."""
    before = show("MainPID", "NRestarts")
    os.kill(int(before["MainPID"]), signal.SIGSTOP)
    found["still_restarted"] = eventually(lambda: show("NRestarts")["NRestarts"] != before["NRestarts"])
    found["still_served_again"] = eventually(lambda: infer("same")[0] == 200)


def bad_configuration() -> None:
    systemctl("stop")
    found["after_stop"] = show("ActiveState", "Result", "ExecMainStatus")
    Path("/etc/edge_server/config.toml").write_text("[htpp]\n")
    systemctl("start")
    time.sleep(3)  # longer than RestartSec: a restart would show
    found["bad_configuration"] = show("ActiveState", "Result", "ExecMainStatus", "NRestarts")
    Path("/etc/edge_server/config.toml").write_text("")
    systemctl("reset-failed")


def credentials() -> None:
    example = Path("/usr/share/edge-server/tls.conf.example").read_text()
    (DROP_INS / "tls.conf").write_text(example)
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    found["tls_start"] = systemctl("start").returncode
    found["tls_ready"] = ask("/v2/health/ready", scheme="https")[0]
    found["tls_grpc"] = ssl.get_server_certificate(("127.0.0.1", 8001), timeout=20)[:27]
    found["key_mode"] = oct(os.stat("/etc/edge_server/tls/server.key").st_mode & 0o7777)
    systemctl("stop")


def remove() -> None:
    packages = ("edge-server", "edge-server-models", "edge-server-runtimes")
    subprocess.run(["dpkg", "--remove", *packages], capture_output=True, check=False)
    found["removed"] = not Path("/opt/edge_server").exists()
    found["models_kept"] = Path("/var/lib/edge_server/models/same/config.pbtxt").exists()


def main() -> None:
    for step in (start_and_serve, reload, hang, stop_process, bad_configuration, credentials, remove):
        Path("/results/reached").write_text(step.__name__)
        try:
            step()
        except Exception:  # noqa: BLE001 - every error is reported to the test outside
            # What follows needs what went before.
            found["error"] = f"{step.__name__}: {traceback.format_exc()}"
            found["journal"] = journal()
            break


try:
    main()
finally:
    Path("/results/results.json").write_text(json.dumps(found))
