"""Documents read from files.

documents          one at a time, in bounded memory (compressed, long_lines, samples), each validated
inputs             choice of files, and their split into shards
"""
