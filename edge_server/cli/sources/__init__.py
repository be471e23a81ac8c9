"""Picture sources of `edge-server stream`: video files, folders, cameras, a portrait, a test pattern.

One module per kind of source, chosen in `choose`; `pace` says when the next picture is due, `pack` makes a picture the
frame that is sent. OpenCV is imported by what needs it, when it is needed.
"""
