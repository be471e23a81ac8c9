"""Picture sources of `edge-server stream`: video files, folders, cameras, a portrait, a test pattern.

One module per kind of source; `source_choice` selects one. `frame_schedule` computes when the next picture is due, and
`frame_encoding` converts a picture into a frame. OpenCV is imported only when needed.
"""
