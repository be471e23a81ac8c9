"""Make tests/data/tracks.npz: scenes of moving boxes, and the tracks that the PyPI package `trackers` finds in them.

    python3 -m venv /tmp/reference && /tmp/reference/bin/pip install trackers==2.6.1
    /tmp/reference/bin/python tests/plugins/vision/record_tracks.py

One row per box, best first within a frame. `truth` is the id of the object, -1 for a false box; `reference` is the
id from ByteTrackTracker, -1 for none, with both score thresholds at 0.5 and a timestamp for each frame.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import supervision as sv
from trackers import ByteTrackTracker

FPS = 30.0
FRAMES = 120
TARGET = Path(__file__).parents[2] / "data" / "tracks.npz"


def crossing(rng: np.random.Generator, frame: int) -> list[tuple[int, float, float, float, float, float]]:
    """Two people pass each other at different depths; the farther one scores low while it is partly hidden."""
    score = 0.2 if 55 <= frame <= 62 else 0.8
    return [(0, 50 + 5 * frame, 200, 60, 160, 0.9), (1, 640 - 5 * frame, 215, 45, 120, score)]


def hidden(rng: np.random.Generator, frame: int) -> list[tuple[int, float, float, float, float, float]]:
    """One walks behind a pillar for a third of a second, one stands still, one leaves, and one enters much later."""
    found = [(0, 400.0, 100.0, 80.0, 200.0, 0.85)]
    if not 40 <= frame < 50:
        found.append((1, 30 + 4 * frame, 300, 60, 150, 0.8))
    if frame < 30:
        found.append((2, 560 + 2 * frame, 60, 40, 90, 0.75))
    if frame >= 80:
        found.append((3, 600 - 3 * (frame - 80), 60, 40, 90, 0.75))
    return found


def noisy(rng: np.random.Generator, frame: int) -> list[tuple[int, float, float, float, float, float]]:
    """Six objects on their own paths, with false and missing boxes."""
    found = []
    for index in range(6):
        if rng.random() > 0.05:
            x, y = 60 + 90 * index + 20 * np.sin(frame / 15 + index), 80 + 60 * (index % 3) + 0.8 * frame
            found.append((index, x, y, 45 + 3 * index, 60 + 4 * index, float(np.clip(rng.normal(0.7, 0.15), 0.1, 1))))
    if rng.random() < 0.2:
        found.append((-1, rng.uniform(0, 600), rng.uniform(0, 400), 40, 40, rng.uniform(0.5, 0.7)))
    return found


def crowd(rng: np.random.Generator, frame: int) -> list[tuple[int, float, float, float, float, float]]:
    """Ten people in two rows that cross each other; one box in ten is missing."""
    found = []
    for index in range(10):
        if rng.random() < 0.1:
            continue
        way = 1 if index % 2 else -1
        x = 320 + way * (7 * (frame - 60)) + 55 * (index // 2 - 2)
        score = float(np.clip(rng.normal(0.65, 0.15), 0.1, 1))
        found.append((index, x, 150 + 45 * (index % 2) + 3 * (index // 2), 50, 130, score))
    return found


def main() -> None:
    rng = np.random.default_rng(20)
    rows = []
    for number, scene in enumerate((crossing, hidden, noisy, crowd)):
        frames = [(frame / FPS, scene(rng, frame)) for frame in range(FRAMES)]
        for kept_share in (1.0, 0.7, 0.4):
            tracker = ByteTrackTracker(
                frame_rate=FPS,
                track_activation_threshold=0.5,
                high_conf_det_threshold=0.5,
                minimum_consecutive_frames=2,
            )
            for at_s, objects in frames:
                if rng.random() >= kept_share:
                    continue
                boxes = []
                for truth, x, y, width, height, score in objects:
                    x, y, width, height = np.array((x, y, width, height)) + rng.normal(0, 1.0, 4)
                    corners = np.round((x - width / 2, y - height / 2, x + width / 2, y + height / 2), 1)
                    boxes.append((truth, *corners, score))
                boxes.sort(key=lambda box: -box[5])
                table = np.array(boxes)
                # The order of the result differs: the class carries the place.
                found = tracker.update(
                    sv.Detections(table[:, 1:5], confidence=table[:, 5], class_id=np.arange(len(table))), timestamp=at_s
                )
                numbers = dict(zip(found.class_id.tolist(), found.tracker_id.tolist(), strict=True))
                rows += [(number, kept_share, at_s, *box, numbers[place]) for place, box in enumerate(boxes)]
    table = np.array(rows)
    np.savez_compressed(
        TARGET,
        scene=table[:, 0].astype(np.int8),
        kept_share=table[:, 1],
        at_s=table[:, 2],
        truth=table[:, 3].astype(np.int8),
        box=table[:, 4:8].astype(np.float32),
        score=table[:, 8].astype(np.float32),
        reference=table[:, 9].astype(np.int16),
    )


if __name__ == "__main__":
    main()
