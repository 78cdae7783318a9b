"""The checksum of everything on disk: CRC-32, as in zlib and gzip.

It detects every flipped bit and every burst of up to 32 bits, and is the cheapest: 10 GB/s a core here, where SHA-256 runs at
1.3, the speed of the disk itself. It does not protect against forgery; nothing here executes what it reads, so forging would
gain little.
"""

from __future__ import annotations

from ultrascale.storage.checksum import crc32

__all__ = ["checksum_text", "crc32"]


def checksum_text(crc: int) -> str:
    """The checksum as a manifest writes it."""
    return f"crc32:{crc & 0xFFFFFFFF:08x}"
