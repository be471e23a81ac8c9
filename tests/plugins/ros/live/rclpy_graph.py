"""What a live node of ROS 2 sees of another node, run by the Python of fetch_rclpy.sh, without this package.

usage: rclpy_graph.py NODE. For each line of standard input, prints a line for the node, its publishers and its
subscriptions, and an empty line.
"""

from __future__ import annotations

import sys

import rclpy


def main(name: str) -> None:
    rclpy.init()
    node = rclpy.create_node("watcher")
    for _ in sys.stdin:
        found = [
            f"node {space.rstrip('/')}/{one}" for one, space in node.get_node_names_and_namespaces() if one == name
        ]
        for topic, _types in node.get_topic_names_and_types():
            for kind, ends in (
                ("publisher", node.get_publishers_info_by_topic(topic)),
                ("subscription", node.get_subscriptions_info_by_topic(topic)),
            ):
                for one in ends:
                    qos = one.qos_profile
                    if one.node_name == name:
                        found.append(
                            f"{kind} {topic} {one.topic_type} {str(one.topic_type_hash)[:19]} {qos.reliability.name} "
                            f"{qos.durability.name} {qos.depth}"
                        )
        print(*sorted(found), "", sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
