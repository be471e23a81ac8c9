"""Frigate's detector of type `zmq`: frames over ZeroMQ, for video recorders."""
