import dataclasses
from pathlib import Path

import pytest

from edge_server.config import ConfigError, ServerConfig, describe, help_text, parse_serve, process_environment
from edge_server.config.merge_settings import DEMO_MODELS
from edge_server.config.server_config import DeclaredSettings, settings_of_backend
from edge_server.config.setting_sources import _OTHER_FLAGS
from edge_server.config.triton_flag_compatibility import DEPRECATED, IGNORED
from edge_server.plugin import own_plugins

PLUGINS = own_plugins()
DECLARED = DeclaredSettings(PLUGINS)
SETTINGS = DECLARED.settings
REPOSITORY = "--model-repository=/models"


def parse(*argv, **environ):
    return parse_serve([REPOSITORY, *argv], environ, PLUGINS)


def config(*argv, **environ):
    return parse(*argv, **environ).config


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "edge.toml"
        path.write_text(text)
        return f"--config={path}"

    return write


# Triton's own list of options, with its deprecated ones.
TRITON_FLAGS = """
allow-client-shm allow-cpu-metrics allow-gpu-metrics allow-grpc allow-http allow-metrics allow-sagemaker
allow-vertex-ai backend-config backend-directory buffer-manager-thread-count cache-config cache-directory
cuda-memory-pool-byte-size cuda-virtual-address-size disable-auto-complete-config enable-peer-access exit-on-error
exit-timeout-secs grpc-address grpc-header-forward-pattern grpc-http2-max-pings-without-data
grpc-http2-max-ping-strikes grpc-http2-min-recv-ping-interval-without-data grpc-infer-allocation-pool-size
grpc-infer-response-compression-level grpc-infer-thread-count grpc-keepalive-permit-without-calls grpc-keepalive-time
grpc-keepalive-timeout grpc-max-connection-age grpc-max-connection-age-grace grpc-max-response-pool-size grpc-port
grpc-restricted-protocol grpc-root-cert grpc-server-cert grpc-server-key grpc-use-ssl grpc-use-ssl-mutual host-policy
http-address http-header-forward-pattern http-max-input-size http-port http-restricted-api http-thread-count id
load-model log-error log-file log-format log-info log-verbose log-warning metrics-address metrics-config
metrics-interval-ms metrics-port min-supported-compute-capability model-config-name model-control-mode
model-load-gpu-limit model-load-retry-count model-load-thread-count model-namespacing model-repository
pinned-memory-pool-byte-size rate-limit rate-limit-resource repoagent-directory repository-poll-secs reuse-grpc-port
reuse-http-port sagemaker-port sagemaker-safe-port-range sagemaker-thread-count strict-readiness trace-config
vertex-ai-default-model vertex-ai-port vertex-ai-thread-count model-store strict-model-config
response-cache-byte-size trace-file trace-level trace-rate trace-count trace-log-frequency
"""


def test_every_flag_of_triton_is_known():
    assert {f"--{name}" for name in TRITON_FLAGS.split()} <= {*DECLARED.by_flag, *_OTHER_FLAGS}


def test_every_field_of_every_settings_class_has_exactly_one_row():
    fields = [
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(ServerConfig)
        if section.name not in ("backends", "plugin_tables")
        for field in dataclasses.fields(getattr(ServerConfig(), section.name))
    ]
    fields += [f"{name}.{field.name}" for name, table in DECLARED.plugin_tables.items()
               for field in dataclasses.fields(table)]  # fmt: skip
    fields.remove("log.journal_stream")  # the system sets it, not the operator
    fields.remove("repository.measurements_dir")  # follows from two others
    assert sorted(setting.name for setting in SETTINGS) == sorted([*fields, "backends."])


def test_flags_and_variables_are_unique_and_no_flag_is_both_used_and_ignored():
    flags = [flag for setting in SETTINGS for flag in (setting.flag, *setting.aliases)]
    assert len(set(flags)) == len(flags)
    assert len({setting.variable for setting in SETTINGS}) == len(SETTINGS)
    assert not set(flags) & set(IGNORED)
    assert set(DEPRECATED) <= set(flags)


def test_defaults_equal_tritons_except_the_documented_ones():
    given = config()
    assert (given.http.port, given.grpc.port, given.metrics.port) == (8000, 8001, 8002)
    assert {given.http.address, given.grpc.address, given.metrics.address} == {"127.0.0.1"}
    assert given.lifecycle.server_id == "triton"
    assert given.lifecycle.is_readiness_strict is None
    assert not given.lifecycle.exits_on_error
    assert not given.memory.allows_client_shm
    assert given.http.max_input_size_bytes == 64 * 1024 * 1024
    assert 1 <= given.repository.load_thread_count <= 4


def test_a_flag_overrides_a_variable_which_overrides_the_file(toml):
    file = toml("[http]\nport = 1\n[grpc]\nport = 2\n[metrics]\nport = 3\n")
    given = parse(file, "--http-port=10", EDGE_SERVER_HTTP_PORT="11", EDGE_SERVER_GRPC_PORT="12")
    assert (given.config.http.port, given.config.grpc.port, given.config.metrics.port) == (10, 12, 3)
    assert given.origins["http.port"] == "flag --http-port"
    assert given.origins["grpc.port"] == "environment EDGE_SERVER_GRPC_PORT"
    assert given.origins["metrics.port"].startswith("file ")
    assert "http.address" not in given.origins


def test_the_configuration_file_may_be_named_by_a_variable(toml):
    path = toml("[log]\nformat = 'json'\n").removeprefix("--config=")
    assert config(EDGE_SERVER_CONFIG=path).log.format == "json"


def test_boolean_flags_need_no_value_but_accept_one():
    table = [
        (["--allow-http"], True),
        (["--allow-http=true"], True),
        (["--allow-http=1"], True),
        (["--allow-http=ON"], True),
        (["--allow-http=false"], False),
        (["--allow-http=0"], False),
        (["--allow-http", "false"], False),
        (["--allow-http", "--allow-grpc=false"], True),
        (["--allow-http=false", "--allow-http=true"], True),
    ]
    assert [(argv, config(*argv).http.is_enabled) for argv, _ in table] == table


@pytest.mark.parametrize(
    ("argv", "level"), [(["--log-verbose"], 1), (["--log-verbose=3"], 3), (["--log-verbose", "2"], 2)]
)
def test_log_verbose_is_a_number_or_a_bare_flag(argv, level):
    assert config(*argv).log.verbose_level == level


def test_values_follow_their_flag_after_a_space_or_an_equals_sign():
    assert config("--http-address", "0.0.0.0").http.address == "0.0.0.0"
    assert config("--http-address=0.0.0.0").http.address == "0.0.0.0"
    assert config("--id=a=b").lifecycle.server_id == "a=b"


def test_repeated_flags_add_up_and_replace_the_variable():
    given = parse_serve(["--model-repository=/a", "--model-store", "/b"], {"EDGE_SERVER_MODEL_REPOSITORY": "/c:/d"})
    assert given.config.repository.paths == ("/a", "/b")
    assert any("--model-store is deprecated" in warning for warning in given.warnings)
    assert parse_serve([], {"EDGE_SERVER_MODEL_REPOSITORY": "/c:/d"}).config.repository.paths == ("/c", "/d")


def test_backend_settings_merge_key_by_key(toml):
    file = toml(
        "[backends]\nlog = 1\n[backends.onnxruntime]\nthreads = 2\nspin = false\n[backends.openvino]\nx = 'y'\n"
    )
    given = config(file, "--backend-config=onnxruntime,threads=4", "--backend-config=max=8,9")
    assert given.backends == {
        "": {"log": "1", "max": "8,9"},
        "onnxruntime": {"threads": "4", "spin": "false"},
        "openvino": {"x": "y"},
    }
    assert settings_of_backend({**given.backends, "": {"x": "1", "z": "2"}}, "openvino") == {"x": "y", "z": "2"}
    assert settings_of_backend(given.backends, "tensorrt") == {"log": "1", "max": "8,9"}


def test_restricted_groups_are_read_and_their_value_is_kept_secret():
    given = parse("--http-restricted-api=health,metadata:key=hush=hush", "--grpc-restricted-protocol=trace:k=v")
    (group,) = given.config.http.restricted
    assert (group.categories, group.key, group.value) == (("health", "metadata"), "key", "hush=hush")
    assert given.config.grpc.restricted[0].categories == ("trace",)
    assert "hush" not in repr(given.config) + describe(given)
    with pytest.raises(ConfigError) as caught:
        parse("--http-restricted-api=helth:key=hush")
    assert "did you mean 'health'" in str(caught.value)
    assert "hush" not in str(caught.value)


@pytest.mark.sample(3)
@pytest.mark.parametrize("text", ["health", "health:k", "health:k=", ":k=v", "health,:k=v", "health:=v"])
def test_malformed_restricted_groups_are_refused(text):
    with pytest.raises(ConfigError, match="expected <category>"):
        parse(f"--http-restricted-api={text}")


@pytest.mark.parametrize("value", ["p\udce4ss", "a\nb"], ids=["no UTF-8", "two lines"])
def test_a_key_that_no_request_could_show_is_refused(value):
    with pytest.raises(ConfigError, match="expected printable characters") as caught:
        parse(f"--http-restricted-api=health:k={value}")
    assert value not in str(caught.value)


def test_a_category_in_two_groups_is_refused():
    with pytest.raises(ConfigError, match="'health' is in more than one group"):
        parse("--http-restricted-api=health:a=b", "--http-restricted-api=trace,health:c=d")


def test_metrics_do_not_lose_the_certificates_of_http():
    https = ("--http-tls-cert=/c", "--http-tls-key=/k", "--https-client-ca=/ca", "--allow-http=false")
    with pytest.raises(ConfigError, match="--http-tls-cert with --allow-http=false needs --allow-metrics=false too"):
        parse(*https)
    assert not parse(*https, "--allow-metrics=false").config.http.is_enabled


def test_header_patterns_match_whole_names_in_any_case_by_default():
    pattern = config("--http-header-forward-pattern=X-.*").http.header_pattern
    assert pattern.fullmatch("x-frame")
    assert not pattern.fullmatch("y-x-frame")
    exact = config("--grpc-header-forward-pattern=(?-i)X-.*").grpc.header_pattern
    assert exact.fullmatch("X-a")
    assert not exact.fullmatch("x-a")
    assert config("--http-header-forward-pattern=").http.header_pattern is None
    with pytest.raises(ConfigError, match="regular expression"):
        parse("--http-header-forward-pattern=(")


def test_the_metrics_address_follows_the_http_address_unless_given():
    assert config("--http-address=0.0.0.0").metrics.address == "0.0.0.0"
    assert config("--http-address=0.0.0.0", "--metrics-address=127.0.0.1").metrics.address == "127.0.0.1"


def test_mutual_tls_implies_tls():
    files = ["--grpc-server-cert=c", "--grpc-server-key=k", "--grpc-root-cert=r"]
    assert config("--grpc-use-ssl-mutual", *files).grpc.is_tls


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--http-prot=1"], "unknown flag --http-prot, did you mean '--http-port'?"),
        (["--http_port=1"], "did you mean '--http-port'?"),
        (["--allow"], "unknown flag --allow"),
        (["--http-por=1"], "unknown flag --http-por"),
        (["-x"], "unknown flag -x; edge-server serve --help lists all"),
        (["serve"], "unexpected argument 'serve'"),
        (["--http-port"], "--http-port needs a value"),
        (["--http-port", "--grpc-port=1"], "--http-port needs a value"),
        (["--http-port="], "integer of 0 to 65535"),
        (["--http-port=65536"], "integer of 0 to 65535"),
        (["--http-port=-1"], "integer of 0 to 65535"),
        (["--http-port=8_000"], "integer"),
        (["--http-port= 80"], "integer"),
        (["--http-port=\u0663"], "integer"),
        (["--http-port=" + "9" * 5000], "integer"),
        (["--http-max-input-size=0"], "integer of 1"),
        (["--repository-poll-secs=nan"], "number of 0.05"),
        (["--exit-timeout-secs=inf"], "number of 0"),
        (["--exit-timeout-secs=-1"], "number of 0"),
        (["--allow-http=maybe"], "flag --allow-http: expected true"),
        (["--allow-http", "maybe"], "unexpected argument 'maybe'"),
        (["--model-control-mode=pol"], "did you mean 'poll'?"),
        (["--id="], "expected some text"),
        (["--http-address=a\nb"], "printable"),
        (["--backend-config=onnxruntime"], "<backend>,<key>=<value>"),
        (["--backend-config=,a=b"], "<backend>,<key>=<value>"),
        (["--backend-config=x,a="], "<backend>,<key>=<value>"),
        (["--backend-config=default-max-batch-size=-1"], "default-max-batch-size: expected an integer of 0"),
        (["--backend-config=onnxruntime,default-max-batch-size=4.5"], "default-max-batch-size: expected an integer"),
        (["--backend-config=default-max-batch-size=9999999999"], "default-max-batch-size: expected an integer"),
        (["--http-tls-cert=c"], "both --http-tls-cert and --http-tls-key"),
        (["--grpc-use-ssl"], "--grpc-server-cert"),
        (["--grpc-use-ssl-mutual", "--grpc-server-cert=c", "--grpc-server-key=k"], "--grpc-root-cert"),
        (["--load-model=a"], "--model-control-mode=explicit"),
        (["--model-control-mode=explicit", "--load-model=*", "--load-model=a"], "must be the only one"),
        (["--http-port=8001"], "--http-port and --grpc-port are both 8001"),
        (["--http-address=0.0.0.0", "--http-port=8001"], "both 8001"),
        (["--config=/no/such.toml"], "cannot read '/no/such.toml'"),
        (["--config"], "--config needs a value"),
    ],
)
def test_invalid_flags_are_refused_with_the_reason(argv, message):
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[htpp]\nport = 1", "unknown table [htpp], did you mean 'http'?"),
        ("[http]\nprot = 1", "unknown key http.prot, did you mean 'http.port'?"),
        ("port = 1", "key port is in no table, did you mean http.port or grpc.port or metrics.port?"),
        ("nonsense = 1", "key nonsense is in no table"),
        ("http = 1", "must be a table"),
        ("[http]\nport = '80'", "http.port: expected int, got str"),
        ("[http]\nport = true", "http.port: expected int, got bool"),
        ("[http]\nport = [1]", "http.port: expected int, got list"),
        ("[http]\nis_enabled = 1", "http.is_enabled: expected bool, got int"),
        ("[http]\nport = 70000", "integer of 0 to 65535"),
        ("[repository]\npaths = [1]", "repository.paths: expected str, got int"),
        ("[backends.x]\n'a,b' = 1", "no ',' or '='"),
        ("[backends.x]\na = [1]", "expected a string, number or boolean, got list"),
        ("[http\n", "is not TOML"),
    ],
)
def test_invalid_files_are_refused_with_the_reason(toml, text, message):
    with pytest.raises(ConfigError) as caught:
        parse(toml(text))
    assert message in str(caught.value)


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_bytes(b"a = '\xff\xfe'")
    with pytest.raises(ConfigError, match="is not TOML"):
        parse(f"--config={path}")


def test_unknown_variables_are_refused_with_the_nearest_spelling():
    with pytest.raises(ConfigError, match="EDGE_SERVER_HTTP_PROT, did you mean 'EDGE_SERVER_HTTP_PORT'"):
        parse(EDGE_SERVER_HTTP_PROT="1")


def test_other_and_empty_variables_are_ignored():
    given = config(
        HOME="/root",
        EDGE_SERVER_HTTP_PORT="",
        EDGE_SERVER_SERVICE_HOST="10.0.0.1",
        EDGE_SERVER_SERVICE_PORT_HTTP="8000",
        EDGE_SERVER_PORT="tcp://10.0.0.1:8000",
        EDGE_SERVER_PORT_8000_TCP_ADDR="10.0.0.1",
    )
    assert given.http.port == 8000


def test_lists_in_variables_are_split_at_the_separator_of_their_row():
    given = config(
        EDGE_SERVER_LOAD_MODEL="a, b",
        EDGE_SERVER_MODEL_CONTROL_MODE="explicit",
        EDGE_SERVER_BACKEND_CONFIG="tensorrt,plugins=a;b  openvino,x=1",
    )
    assert given.repository.load_models == ("a", "b")
    assert given.backends == {"tensorrt": {"plugins": "a;b"}, "openvino": {"x": "1"}}


def test_unused_flags_of_triton_are_accepted_with_a_warning_each():
    given = parse("--pinned-memory-pool-byte-size", "0", "--cuda-memory-pool-byte-size=0:1", "--enable-peer-access")
    assert [warning.split()[0] for warning in given.warnings] == [
        "--pinned-memory-pool-byte-size",
        "--cuda-memory-pool-byte-size",
        "--enable-peer-access",
    ]


def test_settings_that_look_unintended_cause_a_warning():
    assert any("not encrypted" in warning for warning in parse("--grpc-server-cert=c").warnings)
    assert any("both off" in warning for warning in parse("--allow-http=0", "--allow-grpc=0").warnings)


def test_disabled_listeners_and_port_0_do_not_collide():
    assert config("--http-port=0", "--grpc-port=0", "--metrics-port=0").http.port == 0
    assert config("--http-port=8001", "--allow-grpc=false").http.port == 8001
    assert config("--http-address=127.0.0.2", "--http-port=8001", "--metrics-address=127.0.0.1").http.port == 8001


def test_a_repository_is_needed_to_serve_but_not_to_print_or_help():
    with pytest.raises(ConfigError, match="--model-repository"):
        parse_serve([], {})
    assert parse_serve(["--print-config"], {}).asks_print
    assert parse_serve(["-h", "--http-port=1"], {}).asks_help


def test_demo_adds_the_bundled_models_once_also_to_a_configuration_that_was_printed():
    bundled = str(DEMO_MODELS)
    assert config("--demo").repository.paths == ("/models", bundled)
    assert parse_serve(["--demo"], {}).config.repository.paths == (bundled,)
    assert parse_serve(["--demo", f"--model-repository={bundled}"], {}).config.repository.paths == (bundled,)


def test_demo_without_bundled_models_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("edge_server.config.merge_settings.DEMO_MODELS", tmp_path / "absent")
    with pytest.raises(ConfigError, match="--demo: this installation has no bundled models"):
        parse_serve(["--demo"], {})


def test_help_names_every_flag_variable_and_default():
    text = help_text(DECLARED)
    for setting in SETTINGS:
        assert setting.flag in text
        assert setting.variable in text
    assert "default 8000" in text
    most_used = text.partition("\n\n")[2].partition("\n\n")[0].splitlines()
    assert most_used[0] == "Most used, each explained below:"
    assert len(most_used) == 11
    assert all(len(line) <= 80 for line in most_used)
    assert "EDGE_SERVER_CONFIG" in text


def test_the_printed_configuration_reads_back_as_the_same_configuration(toml):
    given = parse(
        '--http-header-forward-pattern=(?-i)X-\\d+"',
        '--backend-config=onnxruntime,odd key=va\\l"ue',
        "--backend-config=everywhere=1",
        "--log-format=json",
        "--exit-timeout-secs=2.5",
        "--model-control-mode=explicit",
        "--load-model=\u00e4",
        "--load-model=b",
    )
    again = parse_serve([toml(describe(given))], {}, PLUGINS)
    assert again.config == given.config


def test_measurements_are_kept_in_the_state_folder_or_in_the_cache_folder():
    flags = ["--state-dir=/s", "--repository-cache-dir=/c"]
    found = [config(*flags[start:], CACHE_DIRECTORY="/given").repository.measurements_dir for start in range(3)]
    assert found == ["/s", "/c", "/given"]


def test_the_journal_stream_is_read_from_the_variable_of_systemd():
    assert config(JOURNAL_STREAM="8:1234").log.journal_stream == "8:1234"


def test_the_process_environment_is_a_copy(monkeypatch):
    monkeypatch.setenv("EDGE_SERVER_HTTP_PORT", "1")
    environ = process_environment()
    assert environ["EDGE_SERVER_HTTP_PORT"] == "1"
    environ.clear()
    assert process_environment()


@pytest.mark.parametrize(
    ("flags", "limits"),
    [
        ([], ()),
        (["--model-load-gpu-limit=0:0.8"], ((0, 0.8),)),
        (["--model-load-gpu-limit=0:0.8", "--model-load-gpu-limit", "1:1"], ((0, 0.8), (1, 1.0))),
    ],
)
def test_limits_of_gpu_memory_are_tritons(flags, limits):
    assert parse(*flags).config.memory.gpu_load_limits == limits


@pytest.mark.sample(4)
@pytest.mark.parametrize("text", ["0", "0:", ":0.5", "0:80", "0:1.5", "0:-0.5", "gpu:0.5", "0:nan", "0:0.5:1"])
def test_a_limit_that_is_no_fraction_is_refused(text):
    with pytest.raises(ConfigError, match="--model-load-gpu-limit"):
        parse(f"--model-load-gpu-limit={text}")


def test_a_flag_or_variable_sets_whether_a_lost_gpu_ends_the_process():
    assert not parse().config.lifecycle.exits_on_gpu_loss
    assert parse("--exit-on-gpu-loss").config.lifecycle.exits_on_gpu_loss
    assert parse(EDGE_SERVER_EXIT_ON_GPU_LOSS="true").config.lifecycle.exits_on_gpu_loss
