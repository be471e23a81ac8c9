"""Not ROS 2: see the README beside."""

from strict_message import message

ParameterDescriptor = message("ParameterDescriptor", name="string", description="string", read_only="bool")
