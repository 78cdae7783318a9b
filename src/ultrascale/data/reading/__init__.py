"""Documents out of files.

documents          one after the other, in bounded memory (compressed, long_lines, samples), each judged
inputs             which files, cut into which shards
"""
