"""The Python client of the frame stream: needs grpcio and numpy, and nothing of the server.

Programs import everything from here; `FrameStream` is for threads, `AioFrameStream` for asyncio. What they have in
common is free of both: `conversation` (what is said), `flow` (credit and counts), `pictures` (images to frames),
`connection`, `failure`. May import core, errors and the codec of protocol. Used by the command line and `ros`.
"""

from edge_server.client.asyncio_stream import AioFrameStream
from edge_server.client.endpoint import Tls
from edge_server.client.flow_control import BackOff, Counters
from edge_server.client.stream import FrameStream
from edge_server.client.stream_errors import StreamError
from edge_server.core.frame import (
    ClassScore,
    Delivery,
    Detection,
    DropReason,
    Frame,
    FrameDropped,
    FrameHeader,
    FrameResult,
    FrameTimes,
    Keypoint,
    Mask,
    RegionSlice,
    Returns,
    StreamCounts,
    StreamOpened,
)

__all__ = [
    "AioFrameStream",
    "BackOff",
    "ClassScore",
    "Counters",
    "Delivery",
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
    "RegionSlice",
    "Returns",
    "StreamCounts",
    "StreamError",
    "StreamOpened",
    "Tls",
]
