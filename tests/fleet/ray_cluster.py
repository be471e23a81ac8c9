"""A Ray cluster of this machine with the application, for test_ray.py: a program of its own, so that its end is the
cluster's end. Each line of standard input holds settings of `build_app` as JSON, and the application's `name` and
`route_prefix` unless it is the default one; "ready" follows when it is deployed. The line {"delete": NAME} removes an
application. The first line of output is "started" and the address of Ray's metrics.

`python ray_cluster.py HTTP_PORT GRPC_PORT`
"""

import json
import sys

import ray
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions

import edge_server.ray


def main() -> None:
    http_port, grpc_port = map(int, sys.argv[1:])
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000)
    serve.start(
        http_options=HTTPOptions(host="127.0.0.1", port=http_port),
        grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=["edge_server.ray.add_bytes_servicer"]),
    )
    (node,) = ray.nodes()
    print(f"started {node['NodeManagerAddress']}:{node['MetricsExportPort']}", flush=True)
    for line in sys.stdin:
        settings = json.loads(line)
        if "delete" in settings:
            serve.delete(settings["delete"])
        else:
            application = {key: settings.pop(key) for key in ("name", "route_prefix") if key in settings}
            serve.run(edge_server.ray.build_app(settings), **application)
        print("ready", flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
