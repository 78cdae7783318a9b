"""A rank of `ultrascale` that has long to stop in order once its starter has ended: a busy machine saves slowly."""

from __future__ import annotations

import sys

from ultrascale.__main__ import main
from ultrascale.launch import orphans

if __name__ == "__main__":
    orphans.GRACE_SECONDS = 200.0  # what it is for users: test_ends
    sys.exit(main())
