"""What the box tells of itself, one file per kind of source; `box` joins them into one reading.

Everything is read without root and without a daemon. All paths are looked for under one root folder, so that a recorded
tree can stand in for a box.
"""
