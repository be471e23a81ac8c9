"""Build script of the ROS 2 package `edge_server_ros`, for colcon."""

from glob import glob

from setuptools import setup

NAME = "edge_server_ros"

setup(
    name=NAME,
    version="0.1.0",
    packages=[NAME],
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{NAME}"]),
        (f"share/{NAME}", ["package.xml"]),
        (f"share/{NAME}/launch", glob("launch/*.launch.py")),
        (f"share/{NAME}/config", glob("config/*.yaml")),
    ],
    install_requires=["setuptools"],
    zip_safe=True,
    maintainer="The edge_server developers",
    maintainer_email="edge_server@example.org",
    description="A camera topic in, perception topics out, computed by an edge_server.",
    license="Apache-2.0",
    entry_points={"console_scripts": [f"edge_server_node = {NAME}.node:main"]},
)
