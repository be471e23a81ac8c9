"""The Debian packages on a machine booted by systemd: started, reloaded, hung, misconfigured, stopped, removed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

SCENARIO = Path(__file__).parent / "scenario.py"

MODEL = """
backend: "{backend}"
max_batch_size: 8
input {{ name: "INPUT0" data_type: TYPE_INT32 dims: [-1] }}
output {{ name: "OUTPUT0" data_type: TYPE_INT32 dims: [-1] }}
"""

QUICK = """
[Service]
WatchdogSec=5
Environment=EDGE_SERVER_WATCHDOG_RUN_LIMIT_SECS=1
"""


def write_files(folder: Path) -> None:
    """Write the files of the first start: models, a drop-in with a short watchdog timeout, a certificate."""
    models = folder / "var/lib/edge_server/models"
    hangs = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
        for key, value in (("stub_hang", "true"), ("warmup_probe", "false"))
    )
    for name, backend, more in (("same", "identity", ""), ("hangs", "stub", hangs)):
        (models / name / "1").mkdir(parents=True)
        (models / name / "config.pbtxt").write_text(MODEL.format(backend=backend) + more)
    drop_ins = folder / "etc/systemd/system/edge-server.service.d"
    drop_ins.mkdir(parents=True)
    (drop_ins / "quick.conf").write_text(QUICK)
    tls = folder / "etc/edge_server/tls"
    tls.mkdir(parents=True)
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
            "-keyout", str(tls / "server.key"), "-out", str(tls / "server.crt"),
        ],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    (tls / "server.key").chmod(0o600)


@pytest.fixture(scope="module")
def seen(machine: Any, packages: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the scenario saw inside; one boot for all tests."""
    why = machine.missing_requirement()
    if why:
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("machine")
    write_files(folder / "files")
    found: dict[str, Any] = machine.boot(packages, folder / "files", folder, SCENARIO)
    assert "error" not in found, f"{found.get('error')}\n{found.get('journal')}"
    return found


pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


def test_the_service_starts_as_its_own_user_and_is_ready_after_all_loads(seen: dict[str, Any]) -> None:
    assert seen["enabled"] == "enabled"
    after = seen["after_start"]
    assert (after["ActiveState"], after["Type"], after["StatusText"]) == ("active", "notify", "2 models served")
    assert (seen["ready"], seen["infer"][0]) == (200, 200)
    assert seen["uid_is_edge"]
    assert (seen["models_mode"], seen["runtime_mode"]) == ("0o2775", "0o750")


def test_a_reload_applies_log_settings_and_an_invalid_file_changes_nothing(seen: dict[str, Any]) -> None:
    assert (seen["reload"], seen["log_format"]) == (0, "text")
    assert "needs a restart: http.port" in seen["reload_journal"]
    for moment in ("after_reload", "after_bad_reload"):
        assert seen[moment] == {"ActiveState": "active", "NRestarts": "0"}


def test_a_hung_model_makes_the_watchdog_restart_the_service_with_stacks_in_the_journal(
    seen: dict[str, Any],
) -> None:
    assert (seen["hang_asked"], seen["restarted"], seen["served_again"]) == (0, True, True)
    assert seen["after_hang"]["MainPID"] != seen["after_hang"]["before"]["MainPID"]
    assert "instance hangs" in seen["hang_journal"]
    assert "Watchdog timeout" in seen["hang_journal"]
    assert "Fatal Python error: Aborted" in seen["hang_journal"]


def test_a_stopped_process_is_restarted(seen: dict[str, Any]) -> None:
    assert (seen["still_restarted"], seen["still_served_again"]) == (True, True)


def test_a_stop_is_clean_and_an_invalid_configuration_is_not_retried(seen: dict[str, Any]) -> None:
    assert seen["after_stop"] == {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0"}
    assert seen["bad_configuration"] == {
        "ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "78", "NRestarts": "0"
    }  # fmt: skip


def test_a_key_that_only_root_can_read_serves_https_as_a_credential(seen: dict[str, Any]) -> None:
    assert (seen["key_mode"], seen["tls_start"], seen["tls_ready"]) == ("0o600", 0, 200)
    assert seen["tls_grpc"] == "-----BEGIN CERTIFICATE-----"


def test_removing_the_package_keeps_models(seen: dict[str, Any]) -> None:
    assert (seen["removed"], seen["models_kept"]) == (True, True)
