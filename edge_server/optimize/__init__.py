"""Which runtime and precision serve a model best on this box: all are opened, run in turns, and compared.

`candidates` says what may be tried and which configuration means it, `worker` is the process that each candidate has
for itself, `child` the end of it that asks, `samples` what they are given, `compare` how far their answers are apart,
`contest` runs them, `choice` picks one, `variant` writes it down. The command is `cli/optimize.py`.
"""
