"""Images to tensors and tensors to results, as the model configuration declares them.

Front ends import from here. This folder imports only `core` and `errors`, and OpenCV with the first image.
`image_plan.image_plan` reads the declaration of a model version once. Its `ImagePlan` takes images: `tensor` the bytes
of a file, `fit` an array, `read_frame` a camera frame, whose picture `write` fits into a row of a batch.

`perception.perception_plan` uses `heads` to make a `PerceptionPlan`, whose `read` converts network outputs to results
of the frame. `draw.annotated_jpeg` draws the results into the frame.
"""
