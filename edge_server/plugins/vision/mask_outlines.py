"""Outlines of object masks as polygons, for drawing, JSON and viewers."""

from __future__ import annotations

import numpy as np

from edge_server.plugins.vision.decode import opencv
from edge_server.protocol.frame_messages import ObjectMask

MAX_PARTS = 8
"""Maximum number of polygons of an object, the largest ones."""

MAX_POINTS = 128
"""Maximum number of points of an object: its JSON stays below 1.5 KB."""


def outline_polygons(mask: ObjectMask) -> list[list[list[int]]]:
    """Return the outer outlines of the connected parts of an object, the largest first: points [x, y] of the frame.

    Points lie on corners of pixels. An outline is simplified by at most a pixel, or as far as MAX_POINTS needs it.
    Holes are omitted. Raises ValueError for a mask with data of another size.
    """
    cv2 = opencv()
    # A corner of pixels belongs to the object if one of its four pixels does, so that outlines enclose whole pixels.
    corners = cv2.dilate(np.pad(mask.pixels().view(np.uint8), ((0, 1), (0, 1))), np.ones((2, 2), np.uint8))
    contours, _ = cv2.findContours(corners, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE, offset=(mask.x, mask.y))
    parts = sorted(contours, key=cv2.contourArea, reverse=True)[:MAX_PARTS]
    # Just small enough to keep the four corners of a single pixel.
    tolerance = 0.7
    while True:
        polygons = [cv2.approxPolyDP(part, tolerance, True).reshape(-1, 2) for part in parts]
        polygons = [polygon for polygon in polygons if len(polygon) > 2]
        if sum(map(len, polygons)) <= MAX_POINTS:
            break
        tolerance *= 1.5
    return [polygon.tolist() for polygon in polygons]
