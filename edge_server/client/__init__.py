"""Python client that sends camera frames to a model of a server and reads the results, as one long stream; and a broker
of actions. It needs grpcio, hpack and numpy, and no part of the server.

Programs import everything from here: `FrameStream` is for threads, `AioFrameStream` for asyncio. Both use
`stream_protocol` (messages), `frame_flow_control` (credit and counts), `pictures` (images to frames),
`server_connection` (address and TLS) and `stream_errors`. `FrameStream` connects by `http2_call` (with `tls_session`)
where it can, see `ServerEndpoint.needs_grpcio`, all else by grpcio. `ActionBroker` is for robots that ask a policy over
any wire, and `reconnecting` makes their connection anew. May import core, errors and protocol. Used by the command line
and `ros`.
"""

from edge_server.client.action_broker import ActionBroker, BrokerCounts, reconnecting
from edge_server.client.asyncio_stream import AioFrameStream
from edge_server.client.frame_flow_control import Counters
from edge_server.client.server_connection import Tls
from edge_server.client.stream import FrameStream
from edge_server.client.stream_errors import StreamError
from edge_server.core.back_off import BackOff
from edge_server.protocol.frame_messages import (
    ClassScore,
    Delivery,
    DenseMap,
    Detection,
    DropReason,
    Frame,
    FrameDropped,
    FrameHeader,
    FrameResult,
    FrameTimes,
    Keypoint,
    Mask,
    ObjectMask,
    RegionSlice,
    Returns,
    RotatedBox,
    StreamCounts,
    StreamOpened,
)

__all__ = [
    "ActionBroker",
    "AioFrameStream",
    "BackOff",
    "BrokerCounts",
    "ClassScore",
    "Counters",
    "Delivery",
    "DenseMap",
    "Detection",
    "DropReason",
    "Frame",
    "FrameDropped",
    "FrameHeader",
    "FrameResult",
    "FrameStream",
    "FrameTimes",
    "Keypoint",
    "Mask",
    "ObjectMask",
    "RegionSlice",
    "Returns",
    "RotatedBox",
    "StreamCounts",
    "StreamError",
    "StreamOpened",
    "Tls",
    "reconnecting",
]
