"""Schemas of every JSON output, and the files made of them.

documents          key by key: the one description
json_schema, stub  JSON Schemas and type hints, generated
stamp              the version in each document
"""
