"""The governor: keeps the server inside the box's heat, power and memory, and sheds the least important work first.

`sensors` tell what the box feels, as one `readings.BoxReading`; `policy` turns it into what may run, which is applied
at the `gate` that the serving core and the frame streams ask; `energy` learns what an inference costs. `plant` and
`simulate` are a box made of numbers to try the law on. Imported by the composition root and the command line only.
"""
