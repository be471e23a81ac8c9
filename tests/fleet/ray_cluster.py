"""A Ray cluster of this machine with the application, for test_ray.py: a program of its own, so that its end is the
cluster's end. Each line of standard input holds settings of `build_app` as JSON; "ready" follows when they are
deployed.

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
    print("started", flush=True)
    for line in sys.stdin:
        serve.run(edge_server.ray.build_app(json.loads(line)))
        print("ready", flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
