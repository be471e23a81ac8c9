"""Handlers of the RPCs of Triton's GRPCInferenceService except inference: health, metadata, repository, shared memory,
statistics, trace, logging."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from edge_server.errors import InvalidRequest, NotFound, Refusal, Unsupported
from edge_server.frontends.v2 import control_responses
from edge_server.frontends.v2.version_text import parse_version
from edge_server.protocol import messages

if TYPE_CHECKING:
    from edge_server.service import InferenceService

Message: TypeAlias = Any
"""A generated protobuf message."""

_FILE_PREFIX = "file:"


class ControlRpcs:
    """Control RPCs; each method takes and returns the messages of the RPC that it is named after."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    def table(self) -> Mapping[str, Callable[[Message], Message]]:
        """Return the RPCs by name, as in grpc_service.proto."""
        return {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelConfig": self.model_config,
            "ModelStatistics": self.model_statistics,
            "RepositoryIndex": self.repository_index,
            "RepositoryModelLoad": self.load,
            "RepositoryModelUnload": self.unload,
            "SystemSharedMemoryStatus": self.shared_memory_status,
            "SystemSharedMemoryRegister": self.register_shared_memory,
            "SystemSharedMemoryUnregister": self.unregister_shared_memory,
            "CudaSharedMemoryStatus": self.cuda_memory_status,
            "CudaSharedMemoryRegister": self.register_cuda_memory,
            "CudaSharedMemoryUnregister": self.unregister_cuda_memory,
            "TraceSetting": self.trace_setting,
            "LogSettings": self.log_settings,
        }

    def server_live(self, request: Message) -> Message:
        return messages.ServerLiveResponse(live=self._service.is_live())

    def server_ready(self, request: Message) -> Message:
        return messages.ServerReadyResponse(ready=self._service.is_ready())

    def model_ready(self, request: Message) -> Message:
        """Return false for an unknown model, as older Triton releases do: clients poll for models not yet loaded."""
        try:
            is_ready = self._service.is_model_ready(request.name, parse_version(request.version))
        except NotFound:
            is_ready = False
        return messages.ModelReadyResponse(ready=is_ready)

    def server_metadata(self, request: Message) -> Message:
        return _filled(
            messages.ServerMetadataResponse, control_responses.server_metadata(self._service.server_metadata())
        )

    def model_metadata(self, request: Message) -> Message:
        metadata = self._service.model_metadata(request.name, parse_version(request.version))
        return _filled(messages.ModelMetadataResponse, control_responses.model_metadata(metadata))

    def model_config(self, request: Message) -> Message:
        spec = self._service.find(request.name, parse_version(request.version)).spec
        from google.protobuf import json_format

        response = messages.ModelConfigResponse()
        # Fields of config_json that are not in the message's schema cannot be sent.
        json_format.Parse(spec.config_json, response.config, ignore_unknown_fields=True)
        return response

    def model_statistics(self, request: Message) -> Message:
        versions = self._service.statistics(request.name or None, parse_version(request.version))
        return _filled(messages.ModelStatisticsResponse, control_responses.statistics(versions))

    def repository_index(self, request: Message) -> Message:
        _check_repository(request)
        entries = self._service.repository_index(only_ready=request.ready)
        # Triton's message has no field for a digest.
        entries = [entry._replace(digest="") for entry in entries]
        return _filled(messages.RepositoryIndexResponse, {"models": control_responses.repository_index(entries)})

    def load(self, request: Message, *, may_carry_code: bool = True) -> Message:
        _check_repository(request)
        config: str | None = None
        files: dict[str, bytes] = {}
        for key, parameter in request.parameters.items():
            if key == "config":
                config = _choice(key, parameter, "string_param")
            elif key.startswith(_FILE_PREFIX):
                files[key[len(_FILE_PREFIX) :]] = _choice(key, parameter, "bytes_param")
            else:
                raise InvalidRequest(f"unexpected load parameter '{key}', expected 'config' or '{_FILE_PREFIX}<path>'")
        self._service.load_model(request.model_name, config, files, may_carry_code=may_carry_code)
        return messages.RepositoryModelLoadResponse()

    def unload(self, request: Message) -> Message:
        _check_repository(request)
        dependents = False
        for key, parameter in request.parameters.items():
            if key != "unload_dependents":
                raise InvalidRequest(f"unexpected unload parameter '{key}', expected 'unload_dependents'")
            dependents = _choice(key, parameter, "bool_param")
        self._service.unload_model(request.model_name, unload_dependents=dependents)
        return messages.RepositoryModelUnloadResponse()

    def shared_memory_status(self, request: Message) -> Message:
        regions = control_responses.shared_memory_status(self._service.shared_memory.status(request.name or None))
        return _filled(
            messages.SystemSharedMemoryStatusResponse, {"regions": {region["name"]: region for region in regions}}
        )

    def register_shared_memory(self, request: Message) -> Message:
        self._service.shared_memory.register(request.name, request.key, request.offset, request.byte_size)
        return messages.SystemSharedMemoryRegisterResponse()

    def unregister_shared_memory(self, request: Message) -> Message:
        self._service.shared_memory.unregister(request.name or None)
        return messages.SystemSharedMemoryUnregisterResponse()

    def cuda_memory_status(self, request: Message) -> Message:
        regions = control_responses.cuda_memory_status(self._service.shared_memory.cuda.status(request.name or None))
        return _filled(
            messages.CudaSharedMemoryStatusResponse, {"regions": {region["name"]: region for region in regions}}
        )

    def register_cuda_memory(self, request: Message) -> Message:
        cuda = self._service.shared_memory.cuda
        cuda.register(request.name, request.raw_handle, request.device_id, request.byte_size)
        return messages.CudaSharedMemoryRegisterResponse()

    def unregister_cuda_memory(self, request: Message) -> Message:
        self._service.shared_memory.cuda.unregister(request.name or None)
        return messages.CudaSharedMemoryUnregisterResponse()

    def trace_setting(self, request: Message) -> Message:
        # A setting without a value is cleared.
        wanted: dict[str, object] = {name: list(setting.value) for name, setting in request.settings.items()}
        service = self._service
        now = service.update_trace_settings(request.model_name, wanted) if wanted else None
        response = messages.TraceSettingResponse()
        for key, value in (now or service.trace_settings(request.model_name)).items():
            response.settings[key].value.extend([value] if isinstance(value, str) else value)
        return response

    def log_settings(self, request: Message) -> Message:
        wanted = {
            key: getattr(value, value.WhichOneof("parameter_choice"))
            for key, value in request.settings.items()
            if value.WhichOneof("parameter_choice")
        }
        settings = self._service.log_settings
        try:
            now = settings.update(wanted) if wanted else settings.get()
        except Refusal as error:
            # A wrong format is 503 over HTTP, as in Triton, but an error of the caller over gRPC.
            raise InvalidRequest(error.message) from None
        response = messages.LogSettingsResponse()
        for key, value in now.items():
            setattr(response.settings[key], _log_choice(value), value)
        return response


def _filled(message_class: Any, content: dict[str, object]) -> Message:
    from google.protobuf import json_format

    return json_format.ParseDict(content, message_class())


def _check_repository(request: Message) -> None:
    if request.repository_name:
        raise Unsupported(f"'repository_name' specification is not supported, got '{request.repository_name}'")


def _choice(key: str, parameter: Message, expected: str) -> Any:
    given = parameter.WhichOneof("parameter_choice")
    if given != expected:
        raise InvalidRequest(f"invalid value type for '{key}' parameter, expected {expected}, got {given}")
    return getattr(parameter, expected)


def _log_choice(value: object) -> str:
    if isinstance(value, bool):
        return "bool_param"
    return "uint32_param" if isinstance(value, int) else "string_param"
