"""Launch file of the ROS 2 node: ros2 launch edge_server_ros edge_server.launch.py model_name:=yolox
image:=/camera/image_raw"""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import LifecycleNode
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

ARGUMENTS = {
    "autostart": (True, "false: another program configures and activates the node"),
    "server_address": ("127.0.0.1:8001", "gRPC address of the server"),
    "model_name": ("efficientnet_lite0", "model that answers"),
}


def generate_launch_description() -> LaunchDescription:
    params_file = PathJoinSubstitution([FindPackageShare("edge_server_ros"), "config", "params.yaml"])
    given = {
        name: ParameterValue(LaunchConfiguration(name), value_type=type(value))
        for name, (value, _) in ARGUMENTS.items()
    }
    return LaunchDescription(
        [
            DeclareLaunchArgument("params_file", default_value=params_file, description="all parameters"),
            DeclareLaunchArgument("image", default_value="image", description="topic of the camera"),
            *(
                DeclareLaunchArgument(name, default_value=str(value), description=text)
                for name, (value, text) in ARGUMENTS.items()
            ),
            LifecycleNode(
                package="edge_server_ros",
                executable="edge_server_node",
                name="edge_server",
                namespace="",
                output="screen",
                parameters=[LaunchConfiguration("params_file"), given],
                remappings=[("image", LaunchConfiguration("image"))],
            ),
        ]
    )
