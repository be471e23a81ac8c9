"""Sensors of the machine, one file per kind of source; `all_sensors` joins them into one reading.

Everything is read without root rights and without a daemon. All paths are below one root folder, so that tests can use
a recorded tree of files. Modules for one kind of board are imported only on such a board.
"""
