"""Output heads: model outputs to boxes, classes and masks, as the configuration declares them.

`declaration` documents the keys. A head (`yolo`, `yolox`, `ssd`, `final`, `yunet`, `blazeface`) turns raw outputs into
candidates in pixels of the network's input; `detections`, `classes` and `masks` make results of the frame out of them.
"""
