"""Fake vision_msgs 4: only the published fields, and of poses no covariance."""

from geometry_msgs.msg import Pose, PoseWithCovariance, Vector3
from sensor_msgs.msg import Header
from strict_message import message

Point2D = message("Point2D", x="float64", y="float64")
Pose2D = message("Pose2D", position=Point2D, theta="float64")
BoundingBox2D = message("BoundingBox2D", center=Pose2D, size_x="float64", size_y="float64")
ObjectHypothesis = message("ObjectHypothesis", class_id="string", score="float64")
ObjectHypothesisWithPose = message("ObjectHypothesisWithPose", hypothesis=ObjectHypothesis, pose=PoseWithCovariance)
Detection2D = message("Detection2D", header=Header, results=[ObjectHypothesisWithPose], bbox=BoundingBox2D, id="string")
Detection2DArray = message("Detection2DArray", header=Header, detections=[Detection2D])
BoundingBox3D = message("BoundingBox3D", center=Pose, size=Vector3)
Detection3D = message("Detection3D", header=Header, results=[ObjectHypothesisWithPose], bbox=BoundingBox3D, id="string")
Detection3DArray = message("Detection3DArray", header=Header, detections=[Detection3D])
Classification = message("Classification", header=Header, results=[ObjectHypothesis])
