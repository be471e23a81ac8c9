"""Not ROS 2: see the README beside."""

from strict_message import message

Point = message("Point", x="float64", y="float64", z="float64")
Vector3 = message("Vector3", x="float64", y="float64", z="float64")
Quaternion = message("Quaternion", x="float64", y="float64", z="float64", w="float64")
Pose = message("Pose", position=Point, orientation=Quaternion)
PoseWithCovariance = message("PoseWithCovariance", pose=Pose)
