"""ROS bridge: sends camera topics or recordings to a running server as frame streams, and publishes the results as
topics.

`bridge` connects a transport to a stream; `messages` converts between ROS messages and `protocol/frame_messages.py`.
Both need no ROS library. Each of `transports` is one file: `dds_transport` speaks ROS 2's DDS protocol without a ROS
installation, the others use an installed ROS. `recordings` runs a recording through a model.
`depth` places detected objects in space, by a depth topic. `model_service` changes the model of a bridge that runs,
`diagnostics` says how a bridge and its server are. `ros2_package` has the packages for a colcon workspace.
This folder talks to a server over the network only. No server imports it.
"""
