"""An RTSP camera, by GStreamer's server, run under the system's python3: [--size=WxH] PORT [USER PASSWORD].

Prints a line once it listens. The stream is at /cam.
"""

import argparse

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtspServer  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--size", default="320x240")
parser.add_argument("port")
parser.add_argument("login", nargs="*")
options = parser.parse_args()
login = options.login
width, height = options.size.split("x")
pictures = (
    f"videotestsrc is-live=true ! video/x-raw,width={width},height={height},framerate=30/1 ! "
    "x264enc tune=zerolatency speed-preset=ultrafast key-int-max=15 ! rtph264pay name=pay0 pt=96"
)

Gst.init(None)
server = GstRtspServer.RTSPServer()
server.set_address("127.0.0.1")
server.set_service(options.port)
factory = GstRtspServer.RTSPMediaFactory()
factory.set_shared(True)
if login:
    auth = GstRtspServer.RTSPAuth()
    token = GstRtspServer.RTSPToken()
    token.set_string("media.factory.role", "user")
    auth.add_basic(GstRtspServer.RTSPAuth.make_basic(*login), token)
    server.set_auth(auth)
    factory.add_role_from_structure(
        Gst.Structure.new_from_string("user,media.factory.access=true,media.factory.construct=true")
    )
factory.set_launch(f"( {pictures} )")
server.get_mount_points().add_factory("/cam", factory)
server.attach(None)
print("listening", flush=True)
GLib.MainLoop().run()
