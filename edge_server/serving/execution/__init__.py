"""Execution of requests on a loaded version: queue, batches, instances, threads, responses and counters.

The scheduler passes a batch and a free instance to `executor`. `inline_rule` decides whether the thread of a caller may
run a batch. Only `serving` imports from here.
"""
