"""Bytes and folders on disk.

files              shards written as streams, ranges read (checksum, dtypes)
folders            folders that appear atomically
patience           retries after transient errors
"""
