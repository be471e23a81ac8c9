"""Triton's sequence batcher: scheduler, executor, and the control and state tensors that the server adds."""
