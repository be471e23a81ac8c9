"""Sources of pictures: cameras, video files, folders and test pictures, and the threads that feed those of the server
into frame streams.

One module per kind of source; `source_choice` selects one by its URL. `source_set` runs the sources of the server, one
`source_runner` each, on the streams of `streams/`. `edge-server stream` reads the same picture sources. OpenCV and PyAV
are imported when a source needs them. Imports no endpoint and no sink.
"""
