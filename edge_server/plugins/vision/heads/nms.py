"""Non-maximum suppression: of boxes that overlap much, the one with the best score is kept.

The loop is OpenCV's: it takes 0.4 ms for 200 boxes that are all kept and lets other threads run; a numpy loop, one step
per box, took 4 to 8 ms. OpenCV gets ranks instead of scores, because it compares scores as FP32. Classes are separated
here by shifting their boxes, because OpenCV's own shift mixes classes if boxes begin left of the frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge_server.plugins.vision.decode import opencv

if TYPE_CHECKING:
    import numpy.typing as npt


def suppress(
    boxes: npt.NDArray[np.float64], classes: npt.NDArray[np.int64] | None, iou_threshold: float
) -> npt.NDArray[np.intp]:
    """Return the indices of the kept boxes, in order. `boxes` (K, 4) are finite corners, best first.

    Greedy: a box is dropped if its intersection over union with a kept box is above `iou_threshold`. Boxes of different
    `classes` do not drop each other, unless `classes` is None. The time grows with K times the number of kept boxes:
    about 20 ms for 2048.
    """
    if len(boxes) < 2:
        return np.arange(len(boxes))
    shapes = boxes.copy()
    shapes[:, 2:] -= shapes[:, :2]
    if classes is not None:
        numbers = np.unique(classes, return_inverse=True)[1]
        shapes[:, 0] += numbers * (boxes[:, 2].max() - boxes[:, 0].min() + 1)
    ranks = np.arange(len(boxes), 0, -1).astype(np.float32)
    stays = opencv().dnn.NMSBoxes(shapes, ranks, 0.0, iou_threshold)
    return np.asarray(stays, np.intp).ravel()
