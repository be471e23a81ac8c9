"""Running the batches of a version: on which thread, through a session, and what is counted and answered.

The scheduler enters at `executor`, with an instance that it took; the version asks `inline` whether the thread of a
caller may run a batch. Only `serving` imports from here.
"""
