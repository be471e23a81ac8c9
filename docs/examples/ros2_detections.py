"""Print the detections of the ROS 2 node `edge_server_ros`: python ros2_detections.py [TOPIC].

Start the node first: ros2 launch edge_server_ros edge_server.launch.py model_name:=face_detection_yunet
"""

import sys

import rclpy
from rclpy.node import Node
from vision_msgs.msg import Detection2DArray


class DetectionPrinter(Node):
    def __init__(self, topic: str) -> None:
        super().__init__("detection_printer")
        self.create_subscription(Detection2DArray, topic, self.print_detections, 1)

    def print_detections(self, message: Detection2DArray) -> None:
        for detection in message.detections:
            center, best = detection.bbox.center.position, detection.results[0].hypothesis
            self.get_logger().info(f"{best.class_id} {best.score:.2f} at {center.x:.0f},{center.y:.0f}")


rclpy.init()
rclpy.spin(DetectionPrinter(sys.argv[1] if len(sys.argv) > 1 else "/detections_output"))
