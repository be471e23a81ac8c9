"""Transports: connections to ROS 1 and ROS 2, each in one file; `transport` says what a bridge needs of them."""
