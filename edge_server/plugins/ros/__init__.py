"""ROS bridge: sends camera topics or recordings to a running server as frame streams, and publishes the results as
topics.

`message_conversion` converts between ROS messages and `protocol/frame_messages.py`; `bridge` connects a transport to
a stream. Both need no ROS library. Each transport is one file: `dds_transport` speaks ROS 2's DDS protocol without a
ROS installation (`ros2_types` has the message layouts), the others use an installed ROS. `replay` runs a `recording`
through a model. This folder talks to a server over the network only. No server imports it."""
