"""Planted faults: classic ways to be wrong, each of which the proof must see.

fault, all_faults  what a fault is; the list, from the files of each part of the program
"""
