"""Simulated robot that shows a policy at work: an arm with two joints whose tip follows a moving target.

`arm` is the arm and its known controller; `cloned_policy` trains a policy that imitates the controller, and writes it
as a model; `loop` runs the arm in real time.
"""
