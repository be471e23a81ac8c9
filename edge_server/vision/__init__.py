"""Frames <-> tensors: decoding, resizing, colour and normalisation, as a model's configuration declares them.

Front ends import from here; this folder imports only `core` and `errors` (and OpenCV, once an image arrives). An image
enters at `plan.ImagePlan.tensor`, as the bytes of a file, or at `plan.ImagePlan.fit`, as an array from a camera; a
model version enters at `plan.image_plan`, which reads the declaration once.
"""
