"""Simulation of pipeline schedules with durations, and faster ways to the same numbers for a search.

play                              simulates a schedule action by action; begin here
pipeline_program, pipeline_board  schedules as arrays; buffers for a simulation
pipeline_steady                   multiplies repeated rounds instead of simulating them
pipeline_bounds, pipelined        closed forms for the bubble; the bubble of whole tables
"""
