"""Robot policies: models that turn a robot's observation into its next actions, over the wires that robots' programs
already speak.

`policy` reads a model's parameters `policy_*`, makes its inputs of an observation and the actions of its outputs.
`robot` runs the observations of one robot. `array_messages` reads and writes MessagePack with arrays; `openpi_port` and
`groot_port` are the wires, carried by `connections`.
"""
