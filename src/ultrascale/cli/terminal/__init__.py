"""Parsing of arguments and printing of tables, for all verbs.

parse              a verb's function as its command line
screen             consoles; progress after a second
stores             paths that may be in a bucket
"""
