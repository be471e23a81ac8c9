"""Text of an instance report."""

from edge_server.core.status_reports import InstanceReport


def report(runtime: str, instance_count: int) -> InstanceReport:
    return InstanceReport("m", 1, "x", runtime, "CPU", "f32", instance_count, 0.1, 0, ())


def test_a_version_says_what_runs_it_where_and_how_often() -> None:
    assert report("openvino 2026.4", 2).how_it_runs == "openvino 2026.4 on CPU, f32, 2 instance(s)"


def test_an_ensemble_has_no_device_of_its_own() -> None:
    assert report("ensemble of 3 step(s)", 0).how_it_runs == "ensemble of 3 step(s)"
