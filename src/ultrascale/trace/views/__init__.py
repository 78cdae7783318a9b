"""Views of a trace: terminal, files, explanations.

view, files        on a terminal; as pictures and trace files for other tools
explain            why a rank runs out of memory
compare, lines     comparison with the plan; lines of code
"""
