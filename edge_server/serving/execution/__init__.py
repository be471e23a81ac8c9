"""Execution of requests on a loaded version: queues them, makes batches, runs these on instances, sends responses and
counts.

A request enters at `ModelVersion.submit`, waits in the queue of its `scheduler`, and is answered by the `executor` of a
free `instance`. `inline_rule` decides whether the thread of a caller may run a batch. Imported by `serving`; other
parts use its interfaces (`served_version`, `admission_control`).
"""
