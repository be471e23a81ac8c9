"""Triton's sequence batcher: requests of one sequence run in order on one instance, with the tensors that the server
adds.

A version with a sequence configuration uses these in place of the scheduler and executor of `execution`. A request
enters at `SequenceScheduler.submit`. Only `serving` imports from here."""
