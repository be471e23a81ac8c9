"""Launch file of the ROS 2 node: ros2 launch edge_server_ros edge_server.launch.py model_name:=yolox
image:=/camera/image_raw"""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

ARGUMENTS = {
    "server_address": ("127.0.0.1:8001", "gRPC address of the server"),
    "model_name": ("efficientnet_lite0", "model that answers"),
}


def generate_launch_description() -> LaunchDescription:
    defaults = PathJoinSubstitution([FindPackageShare("edge_server_ros"), "config", "params.yaml"])
    given = {name: ParameterValue(LaunchConfiguration(name), value_type=str) for name in ARGUMENTS}
    return LaunchDescription(
        [
            DeclareLaunchArgument("params_file", default_value=defaults, description="all parameters"),
            DeclareLaunchArgument("image", default_value="image", description="topic of the camera"),
            *(
                DeclareLaunchArgument(name, default_value=value, description=text)
                for name, (value, text) in ARGUMENTS.items()
            ),
            Node(
                package="edge_server_ros",
                executable="edge_server_node",
                name="edge_server",
                output="screen",
                parameters=[LaunchConfiguration("params_file"), given],
                remappings=[("image", LaunchConfiguration("image"))],
            ),
        ]
    )
