"""Words in and tables out, for all verbs.

parse              a verb's function as its command line
screen             consoles; progress after a second
stores             paths that may be a bucket's
"""
