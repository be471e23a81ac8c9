"""Parts of `edge-server stream`: counts and ages, the live table, result lines, annotated pictures.

`tally`, `percentiles`, `words` and `board` are pure; `camera` is one stream to the server, `screen` the terminal.
"""
