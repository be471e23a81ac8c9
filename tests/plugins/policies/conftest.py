"""Fixture for the bridge of LeRobot's clients: modules with the names of lerobot, which is not installed here.

What they do is what lerobot 0.4.4 does, as far as the bridge asks it: async_inference/helpers.py, transport/utils.py,
transport/services_pb2.py and services_pb2_grpc.py.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

BRIDGE = Path(__file__).parents[3] / "docs/examples/lerobot_bridge.py"

Field = descriptor_pb2.FieldDescriptorProto
FIELDS = {
    "RemotePolicyConfig": ("policy_type", "pretrained_name_or_path", "lerobot_features", "actions_per_chunk", "device"),
    "TimedObservation": ("timestamp", "timestep", "observation", "must_go"),
    "TimedAction": ("timestamp", "timestep", "action"),
}
CALLS = {
    "Ready": ("unary_unary", "Empty", "Empty"), "SendPolicyInstructions": ("unary_unary", "PolicySetup", "Empty"),
    "SendObservations": ("stream_unary", "Observation", "Empty"), "GetActions": ("unary_unary", "Empty", "Actions"),
}  # fmt: skip


def make_helpers() -> types.ModuleType:
    helpers = types.ModuleType("lerobot.async_inference.helpers")
    for name, names in FIELDS.items():
        own: dict[str, Any] = {f"get_{field}": (lambda self, field=field: getattr(self, field)) for field in names}
        setattr(
            helpers, name, dataclasses.make_dataclass(name, names, namespace={"__module__": helpers.__name__, **own})
        )

    def make_lerobot_observation(raw: dict[str, Any], features: dict[str, dict[str, Any]]) -> dict[str, Any]:
        frame = {}
        for key, feature in features.items():
            if feature["dtype"] == "float32":
                frame[key] = np.array([raw[name] for name in feature["names"]], np.float32)
            else:
                frame[key] = raw[key.removeprefix("observation.images.")]
        return frame

    helpers.make_lerobot_observation = make_lerobot_observation  # type: ignore[attr-defined]
    return helpers


def make_messages() -> types.ModuleType:
    file = descriptor_pb2.FileDescriptorProto(name="services.proto", package="transport", syntax="proto3")
    for name, fields in {"Empty": "", "PolicySetup": "d", "Actions": "d", "Observation": "sd"}.items():
        message = file.message_type.add(name=name)
        for kind in fields:
            state = kind == "s"
            message.field.add(
                name="transfer_state" if state else "data", number=fields.index(kind) + 1, label=Field.LABEL_OPTIONAL,
                type=Field.TYPE_INT32 if state else Field.TYPE_BYTES,
            )  # fmt: skip
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    messages = types.ModuleType("lerobot.transport.services_pb2")
    for item in file.message_type:
        found = pool.FindMessageTypeByName(f"transport.{item.name}")
        setattr(messages, item.name, message_factory.GetMessageClass(found))
    return messages


def make_service(messages: Any) -> types.ModuleType:
    service = types.ModuleType("lerobot.transport.services_pb2_grpc")

    def add_to_server(servicer: Any, server: grpc.Server) -> None:
        handlers = {
            name: getattr(grpc, f"{kind}_rpc_method_handler")(
                getattr(servicer, name),
                request_deserializer=getattr(messages, given).FromString,
                response_serializer=getattr(messages, answer).SerializeToString,
            )
            for name, (kind, given, answer) in CALLS.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("transport.AsyncInference", handlers),))

    service.AsyncInferenceServicer = type("AsyncInferenceServicer", (), {})  # type: ignore[attr-defined]
    service.add_AsyncInferenceServicer_to_server = add_to_server  # type: ignore[attr-defined]
    return service


def make_utils() -> types.ModuleType:
    utils = types.ModuleType("lerobot.transport.utils")
    utils.bytes_to_python_object = pickle.loads  # type: ignore[attr-defined]
    utils.python_object_to_bytes = pickle.dumps  # type: ignore[attr-defined]
    utils.receive_bytes_in_chunks = (  # type: ignore[attr-defined]
        lambda pieces, queue, shutdown_event, log_prefix="": b"".join(piece.data for piece in pieces)
    )
    return utils


@pytest.fixture(scope="module")
def lerobot() -> Iterator[Any]:
    """Modules with LeRobot's names, whose classes have its fields; and the bridge, which imports them."""
    messages = make_messages()
    torch = types.ModuleType("torch")
    torch.tensor = np.float32  # type: ignore[attr-defined]
    helpers, transport = make_helpers(), types.ModuleType("lerobot.transport")
    made = [helpers, torch, transport, messages, make_service(messages), make_utils()]
    modules = {module.__name__: module for module in made}
    modules |= {name: types.ModuleType(name) for name in ("lerobot", "lerobot.async_inference")}
    for module in made[3:]:
        setattr(transport, module.__name__.rpartition(".")[2], module)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    spec = importlib.util.spec_from_file_location("lerobot_bridge", BRIDGE)
    assert spec is not None
    assert spec.loader is not None
    bridge = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bridge)
    yield types.SimpleNamespace(**vars(helpers), bridge=bridge)
    for name, kept in before.items():
        if kept is None:
            del sys.modules[name]
        else:
            sys.modules[name] = kept
