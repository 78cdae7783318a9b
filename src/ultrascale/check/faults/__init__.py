"""Planted faults: classic ways to be wrong, each of which the proof must see.

table                what each is and which runs can have it
plants, all_faults   the code that plants it, from the files of each part of the program
"""
