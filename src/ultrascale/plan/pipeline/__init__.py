"""A pipeline's lists of actions played with prices, and the faster ways to the same numbers that a search takes.

play                              one list, action by action; begin here
pipeline_program, pipeline_board  lists as arrays; whose turn it is
pipeline_steady                   rounds that repeat are multiplied, not played
pipeline_bounds, pipelined        limits from below and above; the bubble of whole tables
"""
