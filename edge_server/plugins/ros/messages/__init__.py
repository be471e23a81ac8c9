"""ROS messages without ROS: frames and results as messages, and the layouts of ROS 1 and ROS 2."""
