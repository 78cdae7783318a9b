"""Planted faults: classic bugs, each of which the proof must detect.

table                each fault, and the runs that it applies to
all_faults           the code that plants it, in one file for each part of the program
"""
