"""Camera frame streams without a wire: terms, mailboxes, worker threads, counters. The newest frame wins.

A frame enters by `stream_registry` and `camera_stream`, `frame_pipeline` runs the model, the result leaves by the
stream.
Front ends may import from here; nothing here imports a front end."""
