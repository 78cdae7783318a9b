"""Bytes and folders on disk.

files              streams out, ranges in (checksum, dtypes)
folders            folders that appear whole or not at all
patience           once more after an error that may pass
"""
