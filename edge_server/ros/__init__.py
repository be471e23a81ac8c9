"""ROS beside the server: camera topics in, perception topics out, as a client of the frame stream.

`messages` converts between ROS messages and the nouns of `core/frame.py`, `bridge` joins a transport to a stream; both
are free of any ROS library. A transport is one file: `dds` speaks ROS 2's DDS wire without a ROS installation (`types`
knows the layouts), others use the ROS that is installed. `replay` does the same with a `recording`. Talks to a server
over the wire only; may import core, errors and client. Imported by the command line.
"""
