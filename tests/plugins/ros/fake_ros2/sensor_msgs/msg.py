"""Not ROS 2: the fields of sensor_msgs and std_msgs that cameras fill."""

from strict_message import message

Time = message("Time", sec="int32", nanosec="uint32")
Header = message("Header", stamp=Time, frame_id="string")
Image = message(
    "Image", header=Header, height="uint32", width="uint32", encoding="string", is_bigendian="uint8", step="uint32",
    data="uint8[]",
)  # fmt: skip
CompressedImage = message("CompressedImage", header=Header, format="string", data="uint8[]")
