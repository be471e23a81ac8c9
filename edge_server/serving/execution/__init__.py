"""Execution of requests on a loaded version: queue, batches, instances, threads, responses and counters.

The scheduler enters at `executor`, with an instance that it took; the version asks `inline` whether the thread of a
caller may run a batch. Only `serving` imports from here.
"""
