"""Metrics page."""

import gc
import math
import platform
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

import edge_server
from edge_server.core.model_statistics import Duration, VersionStatistics
from edge_server.core.status_reports import InstanceReport
from edge_server.telemetry.host_usage import HostReading, HostSampler
from edge_server.telemetry.metrics_page import Family, Metrics


def samples(page):
    """Parse a page; the parser puts OpenMetrics' "_total" behind counters that have none, which is undone here."""
    return {
        (
            sample.name if sample.name in page.decode() else sample.name.removesuffix("_total"),
            labels_of(sample),
        ): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def labels_of(sample):
    return tuple(sorted(sample.labels.items()))


def page_of(versions, reports=(), tags=None, host=None):
    page, content_type = Metrics(lambda: versions, lambda: reports, tags or (lambda name, version: {}), host).render()
    assert content_type == "text/plain; charset=utf-8"
    return page


BUSY = VersionStatistics(
    "resnet",
    3,
    inference_count=11,
    execution_count=5,
    pending_count=7,
    load_duration_s=1.25,
    success=Duration(9, 9_000_999),
    queue=Duration(9, 1_000),
    compute_input=Duration(9, 2_000),
    compute_infer=Duration(9, 3_000),
    compute_output=Duration(9, 4_000),
    failures={"BACKEND": 2},
)


def test_every_model_family_has_tritons_name_labels_and_unit():
    got = samples(page_of([BUSY]))
    labels = (("model", "resnet"), ("version", "3"))
    expected = {
        "nv_inference_request_success": 9,
        "nv_inference_count": 11,
        "nv_inference_exec_count": 5,
        "nv_inference_pending_request_count": 7,
        "nv_inference_request_duration_us": 9000,
        "nv_inference_queue_duration_us": 1,
        "nv_inference_compute_input_duration_us": 2,
        "nv_inference_compute_infer_duration_us": 3,
        "nv_inference_compute_output_duration_us": 4,
        "nv_model_load_duration_secs": 1.25,
    }
    assert {name: got[name, labels] for name in expected} == expected


def test_sequences_are_reported_only_for_models_that_have_some():
    camera = VersionStatistics("camera", 1, live_sequences=0, waiting_sequences=3)
    got = samples(page_of([BUSY, camera]))
    told = {key: value for key, value in got.items() if key[0].startswith("edge_sequences")}
    labels = (("model", "camera"), ("version", "1"))
    assert told == {("edge_sequences_live", labels): 0, ("edge_sequences_waiting", labels): 3}
    assert b"edge_sequences" not in page_of([BUSY])


def test_counts_are_printed_with_all_their_digits():
    page = page_of([VersionStatistics("m", 1, inference_count=2**60 + 1)])
    assert f'nv_inference_count{{model="m",version="1"}} {2**60 + 1}\n'.encode() in page


def test_counters_are_typed_as_counters_without_a_suffix():
    page = page_of([BUSY]).decode()
    for name in ("nv_inference_request_success", "nv_inference_count", "nv_inference_request_failure"):
        assert f"# TYPE {name} counter\n" in page
    assert not [line for line in page.splitlines() if line.startswith("nv_") and "_total" in line.partition("{")[0]]
    assert "# TYPE nv_inference_pending_request_count gauge\n" in page


def test_all_reasons_of_failure_are_there_from_the_start():
    got = samples(page_of([VersionStatistics("m", 1)]))
    for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
        assert got["nv_inference_request_failure", (("model", "m"), ("reason", reason), ("version", "1"))] == 0
    got = samples(page_of([BUSY]))
    assert got["nv_inference_request_failure", (("model", "resnet"), ("reason", "BACKEND"), ("version", "3"))] == 2


def test_series_of_an_unloaded_version_are_gone_at_the_next_scrape():
    versions = [BUSY]
    metrics = Metrics(lambda: versions, list, lambda name, version: {}, None)
    assert b"resnet" in metrics.render()[0]
    versions.clear()
    assert b"nv_inference" not in metrics.render()[0]


def test_metric_tags_become_labels_that_no_name_or_value_can_break():
    hostile = 'a"b\\c\nnv_fake 1'
    got = samples(page_of([VersionStatistics("m\n", 1)], tags=lambda name, version: {"my key": hostile, "my-key": "x"}))
    key = (("_my_key", hostile), ("model", "m\n"), ("version", "1"))
    assert got["nv_inference_count", key] == 0
    assert not any(name == "nv_fake" for name, _ in got)


def test_a_model_name_that_is_no_unicode_does_not_spoil_the_page():
    assert rb'model="\udcff"' in page_of([VersionStatistics("\udcff", 1)])


def test_two_entries_with_the_same_labels_are_one_sample():
    page = page_of([VersionStatistics("m", 1), VersionStatistics("m", 1, inference_count=4)]).decode()
    assert [line for line in page.splitlines() if line.startswith("nv_inference_count")] == [
        'nv_inference_count{model="m",version="1"} 4'
    ]


def test_the_page_tells_what_runs():
    report = InstanceReport("m", 1, "openvino", "OpenVINO 2025.1", "CPU", "FP16", 2, 0.5, 0, (), digest="sha256:ab")
    got = samples(page_of([], reports=[report]))
    labels = {
        "model": "m",
        "version": "1",
        "backend": "openvino",
        "runtime": "OpenVINO 2025.1",
        "device": "CPU",
        "precision": "FP16",
        "digest": "sha256:ab",
    }
    assert got["edge_model_info", tuple(sorted(labels.items()))] == 1
    build = (("python", platform.python_version()), ("version", edge_server.__version__))
    assert got["edge_build_info", build] == 1


def test_the_process_is_measured_too():
    got = samples(page_of([]))
    assert got["process_resident_memory_bytes", ()] > 0
    assert got["process_open_fds", ()] > 0


def test_families_of_other_sources_are_rendered():
    def source():
        family = Family("edge_temperature_celsius", "gauge", "Temperature\nby zone")
        family.add({"zone": "cpu"}, math.nan)
        return [family, Family("edge_empty", "gauge", "Nothing")]

    metrics = Metrics(list, list, lambda name, version: {}, None)
    metrics.add_source(source)
    page = metrics.render()[0]
    assert b"# HELP edge_temperature_celsius Temperature\\nby zone\n" in page
    assert b'edge_temperature_celsius{zone="cpu"} nan\n' in page
    assert b"edge_empty" not in page


def test_no_gpu_family_is_invented():
    assert b"nv_gpu" not in page_of([BUSY], host=HostSampler(0))


class Proc:
    """A /proc folder whose numbers the test sets."""

    def __init__(self, folder):
        self.folder = folder
        self.now = 0.0

    def ticks(self, *ticks):
        (self.folder / "stat").write_text(f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 2 3\n")

    def memory(self, text="MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\nHugePages_Total: 0\n"):
        (self.folder / "meminfo").write_text(text)

    def sampler(self, interval_s=2.0):
        return HostSampler(interval_s, proc=self.folder, clock=lambda: self.now)


@pytest.fixture
def proc(tmp_path):
    proc = Proc(tmp_path)
    proc.ticks(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    proc.memory()
    return proc


def test_processor_load_is_the_busy_share_since_the_reading_before(proc):
    sampler = proc.sampler()
    proc.ticks(20, 5, 5, 60, 10, 0, 0, 0, 20, 0)
    assert sampler.read() == HostReading(0.0, 1000 * 1024, 600 * 1024)
    proc.now = 2.0
    assert sampler.read().cpu_utilization == pytest.approx(0.3)
    proc.ticks(120, 5, 5, 60, 10, 0, 0, 0, 120, 0)
    proc.now = 3.9
    assert sampler.read().cpu_utilization == pytest.approx(0.3), "sooner than the interval: the same reading"
    proc.now = 4.0
    assert sampler.read().cpu_utilization == 1.0
    proc.now = 6.0
    assert sampler.read().cpu_utilization == 1.0, "no tick passed: nothing new is known"


@pytest.mark.parametrize("text", ["", "cpu x y", "cpu 1 2", "intr 1 2 3 4 5 6 7 8 9"])
def test_a_stat_file_of_another_kind_means_no_reading(proc, text):
    (proc.folder / "stat").write_text(text)
    assert proc.sampler().read() is None


@pytest.mark.parametrize("text", ["", "MemTotal: x kB\n", "MemTotal: 1 kB\n", "MemTotal:\n"])
def test_a_meminfo_file_of_another_kind_means_no_reading(proc, text):
    proc.memory(text)
    sampler = proc.sampler()
    assert sampler.read() is None
    assert b"nv_cpu" not in page_of([], host=sampler)


def test_this_machine_is_read():
    got = samples(page_of([], host=HostSampler(0)))
    assert 0 <= got["nv_cpu_utilization", ()] <= 1
    assert 0 < got["nv_cpu_memory_used_bytes", ()] < got["nv_cpu_memory_total_bytes", ()]


@pytest.mark.parametrize("collects", [True, False])
def test_the_samples_of_many_models_start_no_garbage_collection(collects):
    models = [replace(BUSY, name=f"m{number}") for number in range(500)]
    collected = []

    def record(phase, info):
        collected.append(phase)

    def tags(name, version):
        # Called when the page has begun: a collection that was due before does not count.
        if name == "m0":
            gc.callbacks.append(record)
        return {}

    (gc.enable if collects else gc.disable)()
    try:
        page_of(models, [], tags)
        assert gc.isenabled() is collects
        # One may follow when the samples are gone.
        assert collected.count("stop") <= collects
    finally:
        gc.enable()
        gc.callbacks.remove(record)
