"""Doctor: checks a machine (board, memory, sensors, permissions, ports, runtimes) and gives advice for each problem.

It serves nothing and changes nothing. Files are read below a root folder that tests replace. Each runtime is tried in
its own process, because a runtime that was built for another processor crashes.
"""
