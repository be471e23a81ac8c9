"""Sensors of the machine (temperature, power, clocks, memory), one file per kind; `all_sensors` joins them into one
reading.

Everything is read without root rights and without a daemon. All paths are below one root folder, so that tests can use
a recorded tree of files. Modules for one kind of board are imported only on such a board.
"""
