"""ROS 2 node of edge_server, for a colcon workspace."""
