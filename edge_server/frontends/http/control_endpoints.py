"""Control endpoints of Triton's HTTP API: health, metadata, repository, shared memory, statistics, trace, logging."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from edge_server.errors import InvalidRequest, Unsupported
from edge_server.frontends.access_control import is_this_machine
from edge_server.frontends.http.aiohttp_server import read_members
from edge_server.frontends.http.operator_endpoints import GovernorView
from edge_server.frontends.http.response import GOVERNOR_HEADER, JSON_TYPE, HttpResponse, json_response, plain_error
from edge_server.frontends.v2 import control_responses
from edge_server.frontends.v2.json_parser import json_type
from edge_server.frontends.v2.version_text import parse_version
from edge_server.service import InferenceService

if TYPE_CHECKING:
    from aiohttp import web

Names = Mapping[str, str]
_Result = TypeVar("_Result")

_FILE_PREFIX = "file:"


class ControlEndpoints:
    """The handlers. `blocking` runs calls that may take as long as a model load.

    `allows_code_upload`: load requests of other machines may contain code too.
    """

    def __init__(
        self,
        service: InferenceService,
        blocking: Executor,
        governor: GovernorView | None = None,
        *,
        allows_code_upload: bool = False,
    ) -> None:
        self._allows_code_upload = allows_code_upload
        self._service = service
        self._governor = governor
        self._blocking = blocking

    async def live(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        return HttpResponse(status=200 if self._service.is_live() else 400)

    async def ready(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        # A server that sheds load is still ready; otherwise a supervisor would restart it.
        headers = {} if self._governor is None else {GOVERNOR_HEADER: self._governor.state().level}
        return HttpResponse(status=200 if self._service.is_ready() else 400, headers=headers)

    async def model_ready(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        # Not on the loop: a model's own check may take seconds.
        is_ready = partial(self._service.is_model_ready, names["model"], _version(names))
        if await asyncio.get_running_loop().run_in_executor(self._blocking, is_ready):
            return HttpResponse()
        return plain_error("Model version not ready", 400)

    async def server_metadata(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        return json_response(control_responses.server_metadata(self._service.server_metadata()))

    async def model_metadata(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        return json_response(
            control_responses.model_metadata(self._service.model_metadata(names["model"], _version(names)))
        )

    async def model_config(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        spec = self._service.find(names["model"], _version(names)).spec
        return HttpResponse(spec.config_json.encode(), headers={"Content-Type": JSON_TYPE})

    async def statistics(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        return json_response(
            control_responses.statistics(self._service.statistics(names.get("model"), _version(names)))
        )

    async def instance_reports(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        return json_response(control_responses.instance_reports(self._service.instance_reports()))

    async def repository_index(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        members = await read_members(request)
        only_ready = _member(members, "ready", bool, False)
        return json_response(control_responses.repository_index(self._service.repository_index(only_ready=only_ready)))

    async def load(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        parameters = _member(await read_members(request), "parameters", dict, {})
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
        may_carry_code = self._allows_code_upload or is_this_machine(request.remote)
        await self._run_blocking(
            partial(self._service.load_model, names["model"], config, files, may_carry_code=may_carry_code)
        )
        return HttpResponse()

    async def unload(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        parameters = _member(await read_members(request), "parameters", dict, {})
        dependents = _member(parameters, "unload_dependents", bool, False)
        await self._run_blocking(partial(self._service.unload_model, names["model"], unload_dependents=dependents))
        return HttpResponse()

    async def named_repository(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        raise Unsupported(f"'repository_name' specification is not supported, got '{names['repository']}'")

    async def shared_memory_status(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        return json_response(
            control_responses.shared_memory_status(self._service.shared_memory.status(names.get("region")))
        )

    async def register_shared_memory(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        members = await read_members(request)
        for key in ("key", "byte_size"):
            if key not in members:
                raise InvalidRequest(f"'{key}' is missing: what to register as region '{names['region']}'")
        key, offset = _member(members, "key", str, ""), _member(members, "offset", int, 0)
        byte_size = _member(members, "byte_size", int, 0)
        await self._run_blocking(partial(self._service.shared_memory.register, names["region"], key, offset, byte_size))
        return HttpResponse()

    async def unregister_shared_memory(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        await self._run_blocking(partial(self._service.shared_memory.unregister, names.get("region")))
        return HttpResponse()

    async def cuda_memory_status(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        return json_response(
            control_responses.cuda_memory_status(self._service.shared_memory.cuda.status(names.get("region")))
        )

    async def register_cuda_memory(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        cuda, name = self._service.shared_memory.cuda, names["region"]
        cuda.check_usable()
        members = await read_members(request)
        for key in ("raw_handle", "byte_size"):
            if key not in members:
                raise InvalidRequest(f"'{key}' is missing: what to register as region '{name}'")
        handle = _decode_base64("raw_handle.b64", _member(_member(members, "raw_handle", dict, {}), "b64", str, ""))
        device_id, byte_size = _member(members, "device_id", int, 0), _member(members, "byte_size", int, 0)
        await self._run_blocking(partial(cuda.register, name, handle, device_id, byte_size))
        return HttpResponse()

    async def unregister_cuda_memory(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        await self._run_blocking(partial(self._service.shared_memory.cuda.unregister, names.get("region")))
        return HttpResponse()

    async def trace_setting(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        return json_response(self._service.trace_settings(names.get("model", "")))

    async def update_trace_setting(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        members = await read_members(request)
        return json_response(
            await self._run_blocking(partial(self._service.update_trace_settings, names.get("model", ""), members))
        )

    async def log_settings(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        return json_response(self._service.log_settings.get())

    async def update_log_settings(self, request: web.BaseRequest, names: Names) -> HttpResponse:
        members = await read_members(request)
        return json_response(await self._run_blocking(partial(self._service.log_settings.update, members)))

    async def _run_blocking(self, call: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._blocking, call)


def _version(names: Names) -> int | None:
    return parse_version(names.get("version", ""))


def _member(members: Mapping[str, object], key: str, kind: type[_Result], default: _Result) -> _Result:
    """Return a member with exactly the type `kind`, or the default if it is absent. Raises InvalidRequest."""
    value = members.get(key, default)
    if type(value) is not kind:
        raise InvalidRequest(f"Unable to parse '{key}': expected {json_type(default)}, got {json_type(value)}")
    return value


def _decode_base64(what: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{what} is not base64: {error}") from None
