"""Governor: keeps the machine within its limits of heat, power and memory, and sheds the least important work first.

`sensors/` read the machine as one `readings.MachineReading`. `policy_inputs` reduces it to one temperature and one
power. `control_policy` decides the allowed share of work. `admission_control` applies it: the serving core and the
frame streams ask it before they start work. `energy_model` learns the energy cost of an inference. `control_loop` is
the loop around them. `machine_check` tells `edge-server doctor` what the sensors say.
"""
