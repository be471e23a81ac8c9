"""Not ROS 2: see the README beside."""
