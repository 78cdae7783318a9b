"""Storage of files: a folder, or a bucket of an object store, behind one class.

store    the common interface: read, conditional put, list by prefix, remove
files    a folder
objects  s3://, gs://, az:// through obstore: one wheel without dependencies, with retries and conditional puts
hub      hf://, a repository of the Hugging Face Hub, read at one commit; hub_branch: written by commits
parts    a large file as many objects, each with its checksum
"""

from ultrascale.storage.errors import ConflictError, DamagedError, MissingError, StorageError
from ultrascale.storage.location import join_url, open_store, url_of
from ultrascale.storage.parts import PartObject, crc_of, download_files, read_parts, upload_file, verify_parts
from ultrascale.storage.store import Store, Stored, Version

__all__ = [
    "ConflictError",
    "DamagedError",
    "MissingError",
    "PartObject",
    "StorageError",
    "Store",
    "Stored",
    "Version",
    "crc_of",
    "download_files",
    "join_url",
    "open_store",
    "read_parts",
    "upload_file",
    "url_of",
    "verify_parts",
]
