"""Parts of `edge-server stream`: frame counts, the live table, result lines, annotated pictures.

`frame_counts`, `percentiles`, `result_text` and `live_table` are pure. `stream_run` combines the parts.
"""
