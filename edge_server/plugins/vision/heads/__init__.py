"""Output heads: model outputs to boxes, classes and masks, as the configuration declares them.

`output_parameters` documents the keys. A detection head (`yolo`, `yolox`, `ssd`, `suppressed_boxes`, `yunet`,
`blazeface`) converts raw outputs to candidates in pixels of the network's input. `detections` converts candidates to
results of the frame. `classification` and `segmentation` convert raw outputs to results of the frame.
"""
