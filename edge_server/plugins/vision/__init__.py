"""Conversion of images to input tensors, and of output tensors to results (classes, boxes, masks), as the model's
configuration says.

An *image* is what users send or declare: a file, a ROS message, the parameters `image_...`. A `Picture` is its decoded
pixels.

Cameras import from here. OpenCV is imported with the first image. `image_plan.make_image_plan` reads the declaration of
a model version once. Its `ImagePlan` takes images: `tensor` the bytes of a file, `fit` an array, `read_frame` a camera
frame, whose picture `write` fits into an item of a batch.

`perception.make_perception_decoder` uses `outputs` to make a `PerceptionDecoder`, whose `decode` converts network
outputs to results of the frame. `draw.annotated_jpeg` draws the results into the frame.
"""
