"""Words in and tables out, for all verbs.

parse, words       a verb's function as its command line
screen, waiting    consoles; progress after a second
stores             paths that may be a bucket's
"""
