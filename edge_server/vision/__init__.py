"""Images to tensors and tensors to results, as the model configuration declares them.

Front ends import from here; this folder imports only `core` and `errors` (and OpenCV, once an image arrives). An image
enters at `plan.ImagePlan.tensor`, as the bytes of a file, at `plan.ImagePlan.fit`, as an array, or, from a camera, at
`plan.ImagePlan.read_frame`, whose picture `plan.ImagePlan.write` fits into a row of a batch; a model version enters at
`plan.image_plan`, which reads the declaration once.

What comes out of the network becomes results of the frame at `perception.PerceptionPlan.read`, made by
`perception.perception_plan` out of what `heads` knows, and can be drawn into the frame by `draw.annotated_jpeg`.
"""
