"""ONVIF, the interface of network cameras: finds them on the local network and asks them for the URLs of their streams.

`discovery` sends the probe, `device` asks one camera, `soap` makes requests and reads responses of both. Only the
command `edge-server cameras find` uses it; a server never sends a probe. Answers may be hostile: sizes and counts are
bounded, XML with a document type is refused, and a camera cannot make the command ask another host.
"""
