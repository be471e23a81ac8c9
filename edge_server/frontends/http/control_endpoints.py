"""Handlers of Triton's HTTP API except inference: health, metadata, repository, shared memory, statistics, trace,
logging."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from edge_server.errors import InvalidRequest, Unsupported
from edge_server.frontends.access_control import is_this_machine
from edge_server.frontends.http.request import Handler, HttpRequest
from edge_server.frontends.http.response import JSON_TYPE, HttpResponse, json_response, plain_error
from edge_server.frontends.http.routes import Route, model_paths
from edge_server.frontends.json_text import json_type
from edge_server.frontends.v2 import control_responses
from edge_server.frontends.v2.version_text import parse_version
from edge_server.service import InferenceService

_Result = TypeVar("_Result")

_FILE_PREFIX = "file:"


_SCHEMAS = "edge_server.frontends.http.schemas"


class ControlEndpoints:
    """The handlers. `health_headers` returns headers for the answer whether the server is ready.

    `allows_code_upload`: load requests of other machines may contain code too.
    """

    def __init__(
        self,
        service: InferenceService,
        health_headers: Callable[[], Mapping[str, str]] = dict,
        *,
        allows_code_upload: bool = False,
    ) -> None:
        self._allows_code_upload = allows_code_upload
        self._service = service
        self._health_headers = health_headers

    def routes(self) -> Sequence[Route]:
        get = partial(Route, "GET", uses_aiohttp=True)
        probe = partial(Route, "GET")  # also what clients ask before an inference: they do not wait for an import
        query = partial(Route, "POST", uses_aiohttp=True)  # changes nothing, although Triton uses POST for it
        change = partial(query, changes_server=True)
        trace, named = "/v2/models/{model}/trace/setting", "/v2/repository/{repository}"
        model = "/v2/repository/models/{model}"
        foreign = f"{named}/models/{{model}}"
        empty, settings, index = f"{_SCHEMAS}:NO_CONTENT", f"{_SCHEMAS}:JSON_BODY", f"{_SCHEMAS}:INDEX"
        load, unload, metadata = f"{_SCHEMAS}:LOAD", f"{_SCHEMAS}:UNLOAD", f"{_SCHEMAS}:MODEL_METADATA"
        server = "Name, version and extensions of the server"
        serves = "Whether the server and its models accept inference"
        accepts = "Whether a model accepts inference"
        counts = "Counts and durations of requests"
        states = "Models of the repository with their states"
        no_names = "Not supported: repositories have no names"
        config = "Configuration of a model"
        described = "Inputs, outputs and versions of a model"
        loaded = "Loaded versions: runtime, device, precision, memory"
        return (
            probe("/v2/health/live", "health", "Whether the server runs", self.live, schema=f"{_SCHEMAS}:LIVE"),
            probe("/v2/health/ready", "health", serves, self.ready, schema=f"{_SCHEMAS}:READY"),
            *(probe(path, "health", accepts, self.model_ready, schema=empty) for path in model_paths("/ready")),
            get("/v2/models/stats", "statistics", counts, self.statistics),
            *(get(path, "statistics", counts, self.statistics) for path in model_paths("/stats")),
            get("/edge/v1/activity", "statistics", "Queues, cache and tokens of all models", self.activity),
            *(get(path, "model-config", config, self.model_config) for path in model_paths("/config")),
            get("/v2/trace/setting", "trace", "Trace settings", self.trace_setting),
            change("/v2/trace/setting", "trace", "Change trace settings", self.update_trace_setting, schema=settings),
            get(trace, "trace", "Trace settings", self.trace_setting),
            change(trace, "trace", "Change trace settings", self.update_trace_setting, schema=settings),
            get("/v2/logging", "logging", "Log settings", self.log_settings),
            change("/v2/logging", "logging", "Change log settings", self.update_log_settings, schema=settings),
            query("/v2/repository/index", "model-repository", states, self.repository_index, schema=index),
            change(f"{model}/load", "model-repository", "Load or reload a model", self.load, schema=load),
            change(f"{model}/unload", "model-repository", "Unload a model", self.unload, schema=unload),
            query(f"{named}/index", "model-repository", no_names, self.named_repository, schema=index),
            query(f"{foreign}/load", "model-repository", no_names, self.named_repository, schema=load),
            query(
                f"{named}/models/{{model}}/unload", "model-repository", no_names, self.named_repository, schema=unload
            ),
            *_memory_routes(
                "/v2/systemsharedmemory",
                "system shared memory",
                self.shared_memory_status,
                self.register_shared_memory,
                self.unregister_shared_memory,
            ),
            *_memory_routes(
                "/v2/cudasharedmemory",
                "CUDA shared memory",
                self.cuda_memory_status,
                self.register_cuda_memory,
                self.unregister_cuda_memory,
            ),
            *(probe(path, "metadata", described, self.model_metadata, schema=metadata) for path in model_paths("")),
            probe("/v2", "metadata", server, self.server_metadata, schema=f"{_SCHEMAS}:SERVER_METADATA"),
            get("/edge/v1/models", "metadata", loaded, self.instance_reports),
        )

    async def live(self, request: HttpRequest) -> HttpResponse:
        # The bodies of the Open Inference Protocol, which KServe's SDK reads. Triton's have none; its clients read the
        # status alone.
        is_live = self._service.is_live()
        return json_response({"live": is_live}, 200 if is_live else 400)

    async def ready(self, request: HttpRequest) -> HttpResponse:
        # A server that sheds load is still ready; otherwise a supervisor would restart it.
        is_ready = self._service.is_ready()
        response = json_response({"ready": is_ready}, 200 if is_ready else 400)
        response.headers.update(self._health_headers())
        return response

    async def model_ready(self, request: HttpRequest) -> HttpResponse:
        # Not on the loop: a model's own check may take seconds.
        is_ready = partial(self._service.is_model_ready, request.names["model"], _version(request))
        if await request.run_blocking(is_ready):
            return HttpResponse()
        return plain_error("Model version not ready", 400)

    async def server_metadata(self, request: HttpRequest) -> HttpResponse:
        return json_response(control_responses.server_metadata(self._service.server_metadata()))

    async def model_metadata(self, request: HttpRequest) -> HttpResponse:
        return json_response(
            control_responses.model_metadata(self._service.model_metadata(request.names["model"], _version(request)))
        )

    async def model_config(self, request: HttpRequest) -> HttpResponse:
        spec = self._service.find(request.names["model"], _version(request)).spec
        return HttpResponse(spec.config_json.encode(), headers={"Content-Type": JSON_TYPE})

    async def activity(self, request: HttpRequest) -> HttpResponse:
        return json_response(
            control_responses.activity(self._service.statistics(None, None), self._service.model_families())
        )

    async def statistics(self, request: HttpRequest) -> HttpResponse:
        return json_response(
            control_responses.statistics(self._service.statistics(request.names.get("model"), _version(request)))
        )

    async def instance_reports(self, request: HttpRequest) -> HttpResponse:
        return json_response(control_responses.instance_reports(self._service.instance_reports()))

    async def repository_index(self, request: HttpRequest) -> HttpResponse:
        members = await request.read_members()
        only_ready = _member(members, "ready", bool, False)
        return json_response(control_responses.repository_index(self._service.repository_index(only_ready=only_ready)))

    async def load(self, request: HttpRequest) -> HttpResponse:
        parameters = _member(await request.read_members(), "parameters", dict, {})
        config = parameters.pop("config", None)
        if config is not None and not isinstance(config, str):
            raise InvalidRequest(f"load parameter 'config' must be a string of JSON, got {json_type(config)}")
        files: dict[str, bytes] = {}
        for key, value in parameters.items():
            if not key.startswith(_FILE_PREFIX):
                raise InvalidRequest(f"unexpected load parameter '{key}', expected 'config' or '{_FILE_PREFIX}<path>'")
            if not isinstance(value, str):
                raise InvalidRequest(f"load parameter '{key}' must be a string of base64, got {json_type(value)}")
            files[key.removeprefix(_FILE_PREFIX)] = _decode_base64(f"load parameter '{key}'", value)
        may_carry_code = self._allows_code_upload or is_this_machine(request.peer)
        await request.run_blocking(
            partial(self._service.load_model, request.names["model"], config, files, may_carry_code=may_carry_code)
        )
        return HttpResponse()

    async def unload(self, request: HttpRequest) -> HttpResponse:
        parameters = _member(await request.read_members(), "parameters", dict, {})
        dependents = _member(parameters, "unload_dependents", bool, False)
        await request.run_blocking(
            partial(self._service.unload_model, request.names["model"], unload_dependents=dependents)
        )
        return HttpResponse()

    async def named_repository(self, request: HttpRequest) -> HttpResponse:
        raise Unsupported(f"'repository_name' specification is not supported, got '{request.names['repository']}'")

    async def shared_memory_status(self, request: HttpRequest) -> HttpResponse:
        return json_response(
            control_responses.shared_memory_status(self._service.shared_memory.status(request.names.get("region")))
        )

    async def register_shared_memory(self, request: HttpRequest) -> HttpResponse:
        members = await request.read_members()
        for key in ("key", "byte_size"):
            if key not in members:
                raise InvalidRequest(f"'{key}' is missing: what to register as region '{request.names['region']}'")
        key, offset = _member(members, "key", str, ""), _member(members, "offset", int, 0)
        byte_size = _member(members, "byte_size", int, 0)
        await request.run_blocking(
            partial(self._service.shared_memory.register, request.names["region"], key, offset, byte_size)
        )
        return HttpResponse()

    async def unregister_shared_memory(self, request: HttpRequest) -> HttpResponse:
        await request.run_blocking(partial(self._service.shared_memory.unregister, request.names.get("region")))
        return HttpResponse()

    async def cuda_memory_status(self, request: HttpRequest) -> HttpResponse:
        return json_response(
            control_responses.cuda_memory_status(self._service.shared_memory.cuda.status(request.names.get("region")))
        )

    async def register_cuda_memory(self, request: HttpRequest) -> HttpResponse:
        cuda, name = self._service.shared_memory.cuda, request.names["region"]
        cuda.check_usable()
        members = await request.read_members()
        for key in ("raw_handle", "byte_size"):
            if key not in members:
                raise InvalidRequest(f"'{key}' is missing: what to register as region '{name}'")
        handle = _decode_base64("raw_handle.b64", _member(_member(members, "raw_handle", dict, {}), "b64", str, ""))
        device_id, byte_size = _member(members, "device_id", int, 0), _member(members, "byte_size", int, 0)
        await request.run_blocking(partial(cuda.register, name, handle, device_id, byte_size))
        return HttpResponse()

    async def unregister_cuda_memory(self, request: HttpRequest) -> HttpResponse:
        await request.run_blocking(partial(self._service.shared_memory.cuda.unregister, request.names.get("region")))
        return HttpResponse()

    async def trace_setting(self, request: HttpRequest) -> HttpResponse:
        return json_response(self._service.trace_settings(request.names.get("model", "")))

    async def update_trace_setting(self, request: HttpRequest) -> HttpResponse:
        members = await request.read_members()
        return json_response(
            await request.run_blocking(
                partial(self._service.update_trace_settings, request.names.get("model", ""), members)
            )
        )

    async def log_settings(self, request: HttpRequest) -> HttpResponse:
        return json_response(self._service.log_settings.get())

    async def update_log_settings(self, request: HttpRequest) -> HttpResponse:
        members = await request.read_members()
        return json_response(await request.run_blocking(partial(self._service.log_settings.update, members)))


def _memory_routes(base: str, memory: str, status: Handler, register: Handler, unregister: Handler) -> Sequence[Route]:
    get = partial(Route, "GET", category="shared-memory", uses_aiohttp=True)
    change = partial(Route, "POST", category="shared-memory", uses_aiohttp=True, changes_server=True)
    begin, end = f"Register a region of {memory}", f"Unregister regions of {memory}"
    region = f"{base}/region/{{region}}"
    return (
        get(f"{base}/status", summary=f"Registered regions of {memory}", handler=status),
        get(f"{region}/status", summary=f"Registered regions of {memory}", handler=status),
        change(f"{region}/register", summary=begin, handler=register, schema=f"{_SCHEMAS}:REGISTER"),
        change(f"{base}/unregister", summary=end, handler=unregister, schema=f"{_SCHEMAS}:NO_CONTENT"),
        change(f"{region}/unregister", summary=end, handler=unregister, schema=f"{_SCHEMAS}:NO_CONTENT"),
    )


def _version(request: HttpRequest) -> int | None:
    return parse_version(request.names.get("version", ""))


def _member(members: Mapping[str, object], key: str, kind: type[_Result], default: _Result) -> _Result:
    """Return a member with exactly the type `kind`, or the default if it is absent. Raises InvalidRequest."""
    value = members.get(key, default)
    if type(value) is not kind:
        raise InvalidRequest(f"Unable to parse '{key}': expected {json_type(default)}, got {json_type(value)}")
    return value


def _decode_base64(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{name} is not base64: {error}") from None
