"""WebSocket server for the Foxglove viewer: publishes the pictures that were sent to the server, and their
detections."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, TypeAlias

from edge_server.errors import InvalidRequest, Unsupported, install_hint
from edge_server.protocol.frame_messages import Detection, Frame, FrameHeader, FrameResult

DEFAULT_ADDRESS = "127.0.0.1:8765"
"""Foxglove connects to this port by default."""

Polygons: TypeAlias = "Sequence[Sequence[Sequence[float]]]"

_GREEN = (0.24, 0.86, 0.31, 1.0)
_FILL_OPACITY = 0.35


class FoxgloveOutput:
    """WebSocket server for viewers. Topics of each stream: /NAME/image or /NAME/image/compressed, and /NAME/detections.

    Messages have the stamps of the frames. They are made only for topics that a viewer has subscribed to. Thread-safe.
    """

    def __init__(self, host: str, port: int, names: Sequence[str]) -> None:
        """Listen, for the streams of these names.

        Raises Unsupported without foxglove-sdk, and InvalidRequest if the address is not free.
        """
        try:
            import foxglove
            from foxglove import channels, messages
        except ImportError:
            raise Unsupported(f"--foxglove needs foxglove-sdk; {install_hint('foxglove')}") from None
        self._messages = messages
        # Before the start: foxglove-sdk may refuse a viewer that subscribes at once to a topic that is added later.
        self._raw = {name: channels.RawImageChannel(f"/{name}/image") for name in names}
        self._compressed = {name: channels.CompressedImageChannel(f"/{name}/image/compressed") for name in names}
        self._detections = {name: channels.ImageAnnotationsChannel(f"/{name}/detections") for name in names}
        try:
            self._server = foxglove.start_server(name="edge-server", host=host, port=port)
        except (RuntimeError, OSError) as error:
            raise InvalidRequest(f"--foxglove={host}:{port}: cannot listen: {error}") from None

    def has_viewers(self, name: str) -> bool:
        """Return whether a viewer has subscribed to a topic of the stream."""
        channels = (self._raw[name], self._compressed[name], self._detections[name])
        return any(channel.has_sinks() for channel in channels)

    def show_frame(self, name: str, frame: Frame) -> None:
        """Show a picture."""
        channel = self._compressed[name] if frame.format else self._raw[name]
        if not channel.has_sinks():
            return
        common = {"timestamp": self._stamp(frame.header), "frame_id": frame.header.frame_id, "data": bytes(frame.data)}
        if frame.format:
            message = self._messages.CompressedImage(format=frame.format, **common)
        else:
            message = self._messages.RawImage(
                width=frame.width, height=frame.height, encoding=frame.encoding, step=frame.step, **common
            )
        channel.log(message)

    def show_result(self, name: str, result: FrameResult, outlines: Sequence[Polygons] = ()) -> None:
        """Show the detections of a result; none removes those of the last one.

        `outlines` are the polygons of each detection, (x, y) in pixels; without them those of its mask are shown.
        """
        channel = self._detections[name]
        if channel.has_sinks():
            stamp = self._stamp(result.header)
            shapes = [self._shape(_box_corners(found), stamp, thickness=2.0) for found in result.detections]
            if not outlines:
                from edge_server.plugins.vision.outputs.instance_masks import outline_polygons

                outlines = [outline_polygons(found.mask) for found in result.detections if found.mask is not None]
            for polygons in outlines:
                fill = self._color((*_GREEN[:3], _FILL_OPACITY))
                shapes += [self._shape(points, stamp, thickness=1.0, fill_color=fill) for points in polygons]
            texts = [self._text(found, stamp) for found in result.detections]
            channel.log(self._messages.ImageAnnotations(timestamp=stamp, points=shapes, texts=texts))

    def close(self) -> None:
        """Disconnect the viewers."""
        self._server.stop()

    def _stamp(self, header: FrameHeader) -> Any:
        return self._messages.Timestamp(header.sec, header.nanosec)

    def _shape(self, points: Sequence[Sequence[float]], stamp: Any, **style: Any) -> Any:
        return self._messages.PointsAnnotation(
            timestamp=stamp,
            type=self._messages.PointsAnnotationType.LineLoop,
            points=[self._messages.Point2(x=x, y=y) for x, y in points],
            outline_color=self._color(_GREEN),
            **style,
        )

    def _text(self, found: Detection, stamp: Any) -> Any:
        x, y = min(_box_corners(found), key=itemgetter(1))
        track = f" #{found.track_id}" if found.track_id else ""
        return self._messages.TextAnnotation(
            timestamp=stamp,
            position=self._messages.Point2(x=x, y=y),
            text=f"{found.text or found.class_name}{track} {found.score:.2f}",
            font_size=14.0,
            text_color=self._color((0.0, 0.0, 0.0, 1.0)),
            background_color=self._color(_GREEN),
        )

    def _color(self, rgba: tuple[float, float, float, float]) -> Any:
        red, green, blue, opacity = rgba
        return self._messages.Color(r=red, g=green, b=blue, a=opacity)


def _box_corners(found: Detection) -> Sequence[tuple[float, float]]:
    """Return the corners of the box, or of the oriented box, from the upper left one clockwise."""
    if found.rotated is not None:
        return found.rotated.corners()
    left, top, right, bottom = found.x_min, found.y_min, found.x_max, found.y_max
    return ((left, top), (right, top), (right, bottom), (left, bottom))
