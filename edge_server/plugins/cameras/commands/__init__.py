"""Commands of cameras: `edge-server stream` (send pictures to a server) and `edge-server view` (watch the streams of a
server).

`stream_run` combines the parts of `stream`: frame counts, the live table, result lines, annotated pictures.
`sent_frame_counts`, `percentiles`, `result_lines` and `stream_display` are pure. `view` shows the streams of a server.
"""
