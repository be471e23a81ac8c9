"""Decoders of model outputs to boxes, classes and masks, as the model's configuration says.

`output_parameters` declares the keys. A detection head (in `yolo`, `ssd`, `faces`) decodes the output tensors to box
candidates in pixels of the network's input. `detections` chooses the head and converts candidates to results of the
frame. `classification` and `semantic_segmentation` decode one output tensor to results of the frame.
"""
