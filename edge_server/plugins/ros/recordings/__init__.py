"""Recordings of ROS: read, run through a model, and written."""
