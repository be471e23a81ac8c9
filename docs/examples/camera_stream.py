"""Send camera frames and print detections: python camera_stream.py PICTURE [HOST:PORT].

The picture stands for a camera; a frame may also be an array (height, width, 3).
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from edge_server.client import FrameStream, Returns

if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
    sys.exit("usage: python camera_stream.py PICTURE [HOST:PORT]")
picture = Path(sys.argv[1]).read_bytes()
address = sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1:8001"


def camera() -> Iterator[bytes]:
    for _ in range(10):
        yield picture
        time.sleep(1 / 30)


with FrameStream(address, "face_detection_yunet", returns=Returns(has_detections=True)) as stream:
    for result in stream.results(camera()):
        boxes = [f"{box.score:.2f} at {box.x_min:.0f},{box.y_min:.0f}" for box in result.detections]
        print(f"frame {result.header.seq}: {'; '.join(boxes) or 'no face'}")
