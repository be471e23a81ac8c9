"""Who imports whom, told by the syntax trees of the package: the direction of imports, the fences around libraries."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from edge_server.own_plugins import plugin_objects
from edge_server.repository.choice import model_formats

ROOT = Path(__file__).parent.parent / "edge_server"

MAY_IMPORT: dict[str, set[str]] = {
    "version": set(),
    "errors": set(),
    "lazy_import": set(),
    "bounded_http": set(),
    "child_command": set(),
    "file_stamp": set(),
    "cgroup_limits": set(),
    "default_tls": set(),
    "own_plugins": set(),
    "record": set(),
    "forked_signals": set(),
    "core": {"errors"},
    "config": {"errors"},
    "protocol": {"core", "errors"},
    "http2": {"core"},
    "client": {"core", "errors", "protocol", "http2"},
    "backends": {"core", "errors"},
    "memory": {"core", "errors", "config", "protocol"},
    "telemetry": {"core", "errors", "config"},
    "repository": {"core", "errors", "config", "telemetry", "protocol", "backends"},
    "serving": {"core", "errors", "config", "telemetry", "memory", "backends"},
    "plugin": {"core", "errors", "config", "backends", "telemetry", "repository", "service", "serving", "frontends"},
    "plugins": {
        "core", "errors", "config", "protocol", "memory", "telemetry", "repository", "serving", "service",
        "frontends", "backends", "client", "plugin", "cli", "bounded_http", "http2",
    },
    "service": {"core", "errors", "config", "telemetry", "memory", "serving"},
    "frontends": {"core", "errors", "config", "telemetry", "memory", "service", "protocol", "http2"},
    "process": {
        "core", "errors", "config", "protocol", "memory", "telemetry", "repository", "serving", "service",
        "frontends", "plugin", "backends",
    },
    "ray": {"config", "errors", "process"},
    "cli": {
        "core", "errors", "config", "protocol", "memory", "telemetry", "repository", "serving", "service",
        "frontends", "process", "backends", "client", "plugin", "bounded_http",
    },
    "__main__": {"cli"},
}  # fmt: skip
"""Package or module -> what of edge_server it may import, itself aside, and what is EVERYBODYS."""

PLUGINS_BELOW = {
    "vision": (
        {"cameras", "trials", "add", "language", "policies"},
        "pictures: their files, what a model needs of them, what is seen in them",
    ),
    "trials": (
        {"tuning", "fleet", "add"},
        "a model is opened in a process of its own, run on chosen inputs, compared and timed",
    ),
    "language": ({"speech"}, "OpenAI's API has one form of errors and of event streams"),
    "dashboard": ({"fleet"}, "the page of a fleet has the styles, the scripts and the headers of a server's page"),
    "cameras": ({"fleet"}, "a box reports over the connection to a broker that the cameras' results take"),
}
"""Plugin -> the plugins that import it, and why. Each line makes its users useless without it: at most five."""

MAX_PLUGINS_BELOW = 5

EVERYBODYS = (
    "version",
    "lazy_import",
    "cgroup_limits",
    "default_tls",
    "own_plugins",
    "record",
    "forked_signals",
    "file_stamp",
    "child_command",
)

PARTS_OF_BACKENDS = {
    "serving": {"edge_server.backends.open_session", "edge_server.backends.base"},
    "repository": {
        "edge_server.backends.load_backend", "edge_server.backends.backend_names", "edge_server.backends.ONNX_ORDER",
        "edge_server.backends.data_backends", "edge_server.backends.engine_backends", "edge_server.backends.base",
        "edge_server.backends.isolation.json_child_process", "edge_server.backends.isolation.json_child_side",
    },
}  # fmt: skip
"""Who may see backends, and which part of it."""

FENCES: dict[str, tuple[str, ...]] = {
    "aiohttp": ("frontends/http/", "plugins/fleet/page/box_poller.py", "ray.py"),
    "hpack": ("http2/",),
    "grpc": ("frontends/grpc/grpcio_transport.py", "client/", "ray.py"),
    "ray": ("ray.py",),
    "starlette": ("ray.py",),
    "google": ("protocol/", "frontends/grpc/", "repository/", "plugins/tuning/clients/grpc_connection.py"),
    "onnxruntime": ("backends/onnxruntime/",),
    "openvino": ("backends/openvino/",),
    "tensorrt": ("plugins/tensorrt/",),
    "tensorrt_rtx": ("plugins/tensorrt/",),
    "pycuda": ("backends/cuda/",),
    "cuda": ("backends/cuda/",),
    "pynvml": ("plugins/governor/sensors/nvml_sensor.py", "plugins/governor/sensors/gpu_clock_actuators.py"),
    "prometheus_client": ("telemetry/",),
    "cv2": ("plugins/vision/",),
    "av": (
        "plugins/cameras/sources/rtsp.py",
        "plugins/speech/audio_file.py",
        "plugins/speech/synthesis/audio_encoder.py",
    ),
    "paho": ("plugins/cameras/sinks/mqtt_connection.py",),
    # securesystemslib, which signs releases, takes keys as objects of it.
    "cryptography": (
        "repository/trust/ed25519_keys.py",
        "plugins/fleet/publish/signing_keys.py",
        "plugins/fleet/follow/signed_repository.py",
    ),
    "msgpack": ("plugins/policies/array_messages.py",),
    "websockets": ("plugins/policies/connections/websocket.py",),
    "foxglove": ("plugins/cameras/commands/foxglove_output.py",),
    "fsspec": ("plugins/remote/object_store.py",),
    "s3fs": (),
    "rich": ("cli/console.py",),
    "redis": ("serving/cache/redis_store.py",),
    "onnx": (),
    "orjson": ("frontends/json_text.py",),
    "opentelemetry": ("plugins/tracing/",),
    "rclpy": ("plugins/ros/ros2_package/",),
    "tritonclient": (),
    "watchdog": ("repository/disk/file_events",),
    "torch": (),
    "treelite": (),
    "ai_edge_litert": (),
    "jax": (),
    "tensorflow": (),
}
"""Library -> the only files, by the beginning of their path, that import it."""


@dataclass(frozen=True)
class Import:
    """`target` is the dotted name imported, the last part of `from a import b` included."""

    path: str
    line: int
    target: str
    is_at_start: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.target}"

    @property
    def owner(self) -> str:
        """The package or module of edge_server that the file belongs to."""
        return self.path.split("/")[0].removesuffix(".py")

    @property
    def part(self) -> str:
        """The package or module of edge_server that is imported."""
        return self.target.split(".")[1] if "." in self.target else ""


@dataclass
class Source:
    """What the tests ask of one file of the package, found in one walk of its syntax tree."""

    path: str
    docstring: str | None = None
    statement_count: int = 0
    imports: list[Import] = field(default_factory=list)
    environment_lines: list[int] = field(default_factory=list)
    """Lines that read the environment."""
    classes: list[str] = field(default_factory=list)
    """Names of the classes at its top."""
    protocols: list[str] = field(default_factory=list)
    """Names of those that are a Protocol."""
    private_uses: list[str] = field(default_factory=list)
    """`name._attribute` of modules outside the standard library."""


@functools.cache
def sources() -> list[Source]:
    return [_source(path) for path in sorted(ROOT.rglob("*.py"))]


@functools.cache
def imports() -> list[Import]:
    return [item for source in sources() for item in source.imports]


def _source(path: Path) -> Source:
    text = path.read_text()
    tree = ast.parse(text, str(path))
    found = Source(path.relative_to(ROOT).as_posix(), ast.get_docstring(tree, clean=False), len(tree.body))
    found.classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    found.protocols = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
    ]
    libraries: set[str] = set()
    private: list[ast.Attribute] = []
    waiting: list[tuple[ast.AST, bool]] = [(tree, True)]
    while waiting:
        outer, is_at_start = waiting.pop()
        is_at_start = is_at_start and not _is_put_off(outer)
        for node in ast.iter_child_nodes(outer):
            for target in _targets(node):
                found.imports.append(Import(found.path, node.lineno, target, is_at_start))
            if isinstance(node, ast.Import):
                bound = {alias.asname or alias.name.split(".")[0]: alias.name.split(".")[0] for alias in node.names}
                libraries |= {local for local, library in bound.items() if _is_foreign(library)}
            elif isinstance(node, ast.Attribute):
                if node.attr in ("environ", "environb", "getenv", "getenvb"):
                    found.environment_lines.append(node.lineno)
                if _is_private(node.attr) and isinstance(node.value, ast.Name):
                    private.append(node)
            waiting.append((node, is_at_start))
    found.imports.sort(key=lambda item: item.line)
    found.private_uses = [
        f"{found.path}:{node.lineno} uses {ast.unparse(node)}"
        for node in private
        if isinstance(node.value, ast.Name) and node.value.id in libraries
    ]
    return found


def _is_foreign(library: str) -> bool:
    return library not in sys.stdlib_module_names and library != "edge_server"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_put_off(node: ast.AST) -> bool:
    """Whether what stands inside is not run when the module is imported."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute in this package"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def inner_imports() -> list[Import]:
    return [item for item in imports() if item.target.split(".")[0] == "edge_server"]


def test_every_part_of_the_package_stands_in_the_table() -> None:
    parts = {path.name.removesuffix(".py") for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    # demo_models: data, a link to model_repository.
    assert parts - {"__init__", "__pycache__", "demo_models"} <= set(MAY_IMPORT)


def test_the_direction_of_imports() -> None:
    wrong = [
        str(item)
        for item in inner_imports()
        if item.owner != "__init__"
        and item.part not in (item.owner, *EVERYBODYS, "")
        and item.part not in MAY_IMPORT[item.owner]
    ]
    assert wrong == []


def test_a_plugin_imports_another_one_only_for_a_reason() -> None:
    found = {
        (item.path.split("/")[1], item.target.split(".")[2])
        for item in inner_imports()
        if item.owner == "plugins" and item.part == "plugins" and item.path.count("/") > 1
    }
    allowed = {(user, below) for below, (users, _) in PLUGINS_BELOW.items() for user in users}
    assert {pair for pair in found if pair[0] != pair[1]} == allowed
    assert len(PLUGINS_BELOW) <= MAX_PLUGINS_BELOW


OTHER_MEANINGS = {
    ("backends/onnxruntime/providers.py", "tensorrt"): "an accelerator of ONNX Runtime",
    ("repository/model_config/config_to_spec.py", "tensorrt"): "the same",
    ("backends/openvino/model_reader.py", "tflite"): "a front end of OpenVINO",
    ("telemetry/metrics_page.py", "python"): "the language, in the metric of the process",
}
"""(File, text) -> what the text means there, which is also the name of a plugin's backend."""


def test_the_core_names_no_plugin_and_nothing_that_a_plugin_declares() -> None:
    """Folders of plugins in any text, also docstrings; backends, platforms and model files of plugins as literals."""
    core_formats = {item.file_name for item in model_formats.CORE_FORMATS}
    declared = {name for plugin in plugin_objects() for name in (*plugin.backends, *plugin.platforms)}
    declared |= {item.file_name for plugin in plugin_objects() for item in plugin.model_formats} - core_formats
    declared -= set(model_formats.CORE_PLATFORMS)
    folder = re.compile(rf"plugins[./]({'|'.join(plugin.name for plugin in plugin_objects())})\b")
    found = set()
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("plugins/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if text in declared or folder.search(text):
                found.add((name, text))
    assert found == set(OTHER_MEANINGS)


def test_entries_of_plugins_import_little() -> None:
    """They are imported at each start. Their settings are declared beside them."""
    wrong = []
    for item in imports():
        _, _, name = item.path.partition("plugins/")
        plugin, _, file = name.partition("/")
        if file not in ("plugin.py", "settings.py") or not item.is_at_start:
            continue
        ours = ("edge_server.plugin.", "edge_server.config.setting.", f"edge_server.plugins.{plugin}.settings.")
        library = item.target.split(".")[0]
        if library not in sys.stdlib_module_names and not item.target.startswith(ours):
            wrong.append(str(item))
    assert wrong == []


def test_the_given_libraries_serve() -> None:
    """They are fixed for the product. Where one costs start time or memory, import it later or for fewer routes:
    aiohttp answers the control and operator routes, and need not answer probes, metrics and inference."""
    given = {"aiohttp", "grpc", "google", "numpy", "pynvml", "prometheus_client", "watchdog"}
    users: dict[str, set[str]] = {library: set() for library in given}
    for item in imports():
        users.get(item.target.split(".")[0], set()).add(item.path)
    users["aiohttp"] -= {"ray.py"}
    assert [library for library in sorted(given) if not users[library]] == []


def test_the_package_itself_imports_only_its_version_and_the_embeddable_server_at_its_first_use() -> None:
    found = [item for item in inner_imports() if item.path == "__init__.py" and item.part != "version"]
    assert {item.target for item in found if not item.target.startswith("edge_server.process.embedded")} == set()
    assert [str(item) for item in found if item.is_at_start] == []


def test_serving_and_repository_see_only_the_contract_of_backends() -> None:
    wrong = [
        str(item)
        for item in inner_imports()
        if item.owner in PARTS_OF_BACKENDS
        and item.part == "backends"
        and not any(f"{item.target}.".startswith(f"{seen}.") for seen in PARTS_OF_BACKENDS[item.owner])
    ]
    assert wrong == []


FRONT_ENDS_BELOW = {
    "grpc": "edge_server.frontends.http2.",
}
"""Front end -> the transport that it is built on."""


def test_front_ends_do_not_import_each_other() -> None:
    wrong = []
    for item in inner_imports():
        mine, other = item.path.split("/"), item.target.split(".")
        if mine[0] == "frontends" and len(mine) > 2 and other[1] == "frontends" and len(other) > 3:
            allowed = (mine[1], "v2")
            below = FRONT_ENDS_BELOW.get(mine[1])
            if below is not None and f"{item.target}.".startswith(below):
                continue
            if other[2] not in allowed and (ROOT / "frontends" / other[2]).is_dir():
                wrong.append(str(item))
    assert wrong == []


def test_the_http_front_end_knows_no_endpoints() -> None:
    """Their routes are passed in, so that a part of the server can bring its own."""
    below = ("frontend", "routes", "request", "aiohttp_adapter", "inference_route", "openapi", "access_check")
    wrong = [
        str(item)
        for item in inner_imports()
        if item.path.removeprefix("frontends/http/").removesuffix(".py") in below and "_endpoint" in item.target
    ]
    assert wrong == []


def test_a_library_is_imported_only_behind_its_fence() -> None:
    wrong = [
        str(item)
        for item in imports()
        if (library := item.target.split(".")[0]) in FENCES and not item.path.startswith(FENCES[library] or "/")
    ]
    assert wrong == []


def test_what_serves_imports_no_submodule_of_a_deferred_library() -> None:
    """Two threads could wait for each other for ever: see lazy_import. Backends are imported after numpy."""
    after_numpy = ("backends", "cli", "client", "plugins/runtimes", "plugins/tuning")
    wrong = [
        str(item)
        for item in imports()
        if item.target.startswith("numpy.") and item.is_at_start and not item.path.startswith(after_numpy)
    ]
    assert wrong == []


def test_core_and_errors_need_the_standard_library_and_numpy_alone() -> None:
    known = sys.stdlib_module_names | {"numpy", "edge_server"}
    wrong = [
        str(item) for item in imports() if item.owner in ("core", "errors") and item.target.split(".")[0] not in known
    ]
    assert wrong == []


def test_core_has_no_threads_no_clock_and_no_input_or_output() -> None:
    forbidden = ("threading", "asyncio", "time", "os", "logging", "socket", "subprocess")
    found = [item for item in imports() if item.owner == "core" and item.target.split(".")[0] in forbidden]
    assert [str(item) for item in found] == []


def test_the_serving_core_knows_no_event_loop() -> None:
    owners = ("core", "serving", "service", "backends", "memory", "repository")
    found = [item for item in imports() if item.owner in owners and item.target.split(".")[0] == "asyncio"]
    assert [str(item) for item in found] == []


def test_the_environment_is_read_only_by_the_configuration() -> None:
    others = [source for source in sources() if not source.path.startswith("config/")]
    wrong = [f"{source.path}:{line}" for source in others for line in source.environment_lines]
    wrong += [str(item) for item in imports() if item.target in ("os.environ", "os.getenv") and item.owner != "config"]
    assert wrong == []


def test_no_import_circle() -> None:
    """Imports inside functions and under TYPE_CHECKING count as well: a circle of files is one file in pieces."""
    modules = {_module(path): path for path in ROOT.rglob("*.py")}
    edges: dict[str, set[str]] = {name: set() for name in modules}
    for item in inner_imports():
        if item.path == "__init__.py":  # the package gives out the embeddable server, which is made of all others
            continue
        # What `from package import name` needs is the package, unless the name is a module of it.
        target = item.target if item.target in modules else item.target.rpartition(".")[0]
        edges[_module(ROOT / item.path)].add(target)
    assert _cycle(edges) == []


FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "serving": (("timer",), ("execution",), ("sequence", "cache"), ("ensemble",), ("lifecycle",)),
    "frontends": (("error_status", "access_control", "listen_error", "memory_budget", "loop_dispatch",
                   "connection_limit", "bound_sockets", "plugin_listener", "reading_thread_count", "decode_cache",
                   "json_number_arrays"),
                  ("json_text",), ("auth_tokens", "v2", "http2"), ("http", "grpc")),
    "plugins.language": (("engines",), ("grammar",), ("text", "embeddings"), ("openai",), ("anthropic", "ollama"),
                         ("backend", "chat_command", "routes", "schemas"), ("plugin",)),
}  # fmt: skip
"""Package -> its folders and files from the lowest floor to the highest. None imports from its own floor or above."""

UPWARD = {
    ("serving.execution.model_version", "serving.cache"): "a version chooses how its requests are cached",
    ("serving.execution.model_version", "serving.sequence"): "a version chooses its scheduler",
    ("serving.execution.warmup", "serving.sequence"): "a warm-up request of a sequence model needs its control inputs",
    ("plugins.language.engines.llama_cpp_engine", "plugins.language.grammar"): "an engine has its form of a grammar",
    ("plugins.language.engines.openvino_engine", "plugins.language.grammar"): "an engine has its form of a grammar",
}
"""(Module, folder above it) -> why the module may import from there."""


@pytest.mark.parametrize("package", FLOORS)
def test_no_folder_imports_from_its_own_floor_or_above(package: str) -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS[package]) for room in rooms}
    wrong = []
    for item in inner_imports():
        module, target = item.path.removesuffix(".py").replace("/", "."), item.target.removeprefix("edge_server.")
        if not module.startswith(f"{package}.") or not target.startswith(f"{package}."):
            continue
        mine, other = (name.removeprefix(f"{package}.").split(".")[0] for name in (module, target))
        if mine in (other, "__init__") or (module, f"{package}.{other}") in UPWARD:
            continue
        if floor[other] >= floor[mine]:
            wrong.append(str(item))
    assert wrong == []


def test_every_exception_to_the_floors_is_needed() -> None:
    there = {(item.path.removesuffix(".py").replace("/", "."), item.target.removeprefix("edge_server.") + ".")
             for item in inner_imports()}  # fmt: skip
    assert [(module, room) for module, room in UPWARD
            if not any(one == module and target.startswith(f"{room}.") for one, target in there)] == []  # fmt: skip


def test_no_private_name_of_a_library_is_used() -> None:
    """Names that begin with an underscore, of modules outside the standard library."""
    wrong = [
        str(item)
        for item in imports()
        if _is_foreign(item.target.split(".")[0]) and any(map(_is_private, item.target.split(".")[1:]))
    ]
    wrong += [use for source in sources() for use in source.private_uses]
    assert wrong == []


def test_every_interface_is_used() -> None:
    """A Protocol that is named nowhere but where it is defined guards nothing."""
    uses = Counter(word for path in ROOT.rglob("*.py") for word in re.findall(r"\w+", path.read_text()))
    assert [f"{source.path}: {name}" for source in sources() for name in source.protocols if uses[name] < 2] == []


def test_no_class_name_means_two_things() -> None:
    names = Counter(name for source in sources() for name in source.classes if not name.startswith("_"))
    assert [name for name, count in names.items() if count > 1] == []


def _module(path: Path) -> str:
    parts = ("edge_server", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _cycle(edges: dict[str, set[str]]) -> list[str]:
    """Return the modules of one cycle, or nothing."""
    done: set[str] = set()

    def walk(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return trail[trail.index(name) :]
        if name in done:
            return []
        for target in sorted(edges.get(name, set()) - {name}):
            if found := walk(target, [*trail, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(edges) if (found := walk(name, []))), [])


def test_the_client_needs_nothing_of_the_server() -> None:
    """But `http2`, which both use."""
    import grpc  # noqa: F401 - the client needs it: without, the test is skipped by its name where it has no wheel

    code = "import sys, edge_server.client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {name for name in loaded if name.startswith(("google.protobuf", "aiohttp", "prometheus", "cv2"))} == set()
    ours = {".".join(name.split(".")[:2]) for name in loaded if name.startswith("edge_server.")}
    assert ours == {
        f"edge_server.{part}" for part in ("client", "core", "errors", "http2", "protocol", "record", "version")
    }
    assert "edge_server.protocol.messages" not in loaded


HEAVY = (
    "onnxruntime", "opentelemetry", "openvino", "cv2", "tensorrt", "tensorrt_rtx", "pycuda", "torch", "onnx", "fsspec",
    "cryptography", "treelite", "ai_edge_litert", "jax", "tensorflow", "redis", "av", "paho",
)  # fmt: skip


@pytest.mark.parametrize("module", ["edge_server", "edge_server.service", "edge_server.process.server"])
def test_importing_the_server_pulls_in_no_runtime(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


IDLE_LIBRARIES = {"google", "watchdog"}
"""Libraries that a server without a model imports."""

IDLE_UNWANTED = (
    "argparse", "difflib", "email", "encodings.idna", "google.protobuf.descriptor_pb2", "http.client",
    "importlib.metadata", "pkgutil", "platform", "urllib.request", "watchdog.observers.polling",
)  # fmt: skip
"""Modules that cost a server without a model a part of a millisecond or more each. Some import many others."""

MAX_IDLE_MODULES = 279
"""Modules of this package in a server without a model: 273 and a few of sensors that other machines have. Each costs
about 0.2 ms and 50 KB, so raise the number only for what every server needs before its first answer."""


def test_a_server_without_a_model_imports_few_modules_and_none_that_draws_on_terminals(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "edge_server", "serve", f"--model-repository={tmp_path}",
               "--http-port=0", "--grpc-port=0", "--metrics-port=0"]  # fmt: skip

    def loaded() -> set[str]:
        lines = (tmp_path / "imports").read_text().splitlines()
        return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}

    with (
        (tmp_path / "imports").open("w") as log,
        subprocess.Popen(command, cwd=ROOT.parent, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            address = re.search(r"HTTP (\S+);", process.stdout.readline())
            assert address is not None
            for path in ("/v2/health/ready", "/v2"):
                with urllib.request.urlopen(f"{address[1]}{path}", timeout=60) as reply:
                    reply.read()
            idle = loaded()
            for path in ("/edge/v1/plugins", "/openapi.json", "/docs/api"):
                with urllib.request.urlopen(f"{address[1]}{path}", timeout=60) as reply:
                    reply.read()
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert "edge_server.process.server" in idle
    ours = {name for name in idle if name.partition(".")[0] == "edge_server"}
    assert len(ours) <= MAX_IDLE_MODULES
    assert sorted(idle.intersection(IDLE_UNWANTED)) == []
    packages = {name.partition(".")[0] for name in idle - ours} - set(sys.stdlib_module_names)
    libraries = {name for name in packages if importlib.util.find_spec(name) is not None and not name.startswith("_")}
    assert libraries - IDLE_LIBRARIES - {"sitecustomize", "usercustomize", "site"} == set()
    later = loaded()
    assert ("aiohttp.web_app" in later, "aiohttp.client" in later) == (True, False)
    assert [name for name in later if name.split(".")[0] == "rich"] == []


def test_every_package_says_what_lives_in_it_and_nothing_else() -> None:
    """`backends` finds runtimes by name; `client`, `config`, `edge_server` name what others take from them."""
    wrong = []
    for source in sources():
        folder, _, file = source.path.rpartition("/")
        if file != "__init__.py":
            continue
        if source.docstring is None:
            wrong.append(f"{folder} has no docstring")
        elif source.statement_count > 1 and folder not in ("", "backends", "client", "config"):
            wrong.append(f"{folder} holds more than its docstring")
    assert wrong == []
