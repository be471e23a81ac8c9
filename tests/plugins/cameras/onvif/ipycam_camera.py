"""The ONVIF part of ipycam, a camera written by others: FOLDER HOST PORT. Prints a line once it listens."""

import sys
from http.server import ThreadingHTTPServer
from types import SimpleNamespace

folder, host, port = sys.argv[1:]
sys.path.insert(0, folder)

from ipycam.config import CameraConfig  # noqa: E402
from ipycam.discovery import WSDiscoveryServer  # noqa: E402
from ipycam.http import IPCameraHTTPHandler  # noqa: E402
from ipycam.onvif import ONVIFService  # noqa: E402

server = ThreadingHTTPServer((host, 0), IPCameraHTTPHandler)
config = CameraConfig(
    name="Front", local_ip=host, onvif_port=server.server_address[1], username="me", password="geheim"
)
service = ONVIFService(config)
IPCameraHTTPHandler.camera = SimpleNamespace(config=config, onvif=service)
WSDiscoveryServer.MULTICAST_PORT = int(port)
WSDiscoveryServer(service).start()
print("listening", flush=True)
server.serve_forever()
