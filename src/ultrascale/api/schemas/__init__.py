"""Schemas of every JSON output, and the files generated from them.

documents          keys of every output: the single source
json_schema, stub  JSON Schemas and type hints, generated
stamp              the version in each document
"""
