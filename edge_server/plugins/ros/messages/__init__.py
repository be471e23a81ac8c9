"""ROS messages without ROS: frames and results as messages, and the layouts of ROS 2."""
