"""Positions of detected objects in space, from depth images and the calibration of the camera."""
