"""Connections of robots over TCP: accepts them, and reads and writes their messages within one bound on memory.

`listener` accepts connections, and ends those that do not become a robot's. `message_stream` reads a connection without
copies; `message_memory` bounds the messages of all robots together. `websocket` and `zmtp` are the two protocols.
"""
