"""Transports: connections to ROS 2, each in one file; `transport` says what a bridge needs of them."""
