"""A rank of `ultrascale train --elastic` that writes down which sequences it reads: NOTES RUN.TOML, under torchrun.

It waits a little before each: no processor trains step after step while nodes come and go, to be compared with all of them.
"""

from __future__ import annotations

import json
import os
import sys
import time

from ultrascale.cli.main import main
from ultrascale.data.loader import Loader

if __name__ == "__main__":
    notes, file = sys.argv[1:]
    read = Loader.read

    def noted(loader, numbers):
        time.sleep(0.1)
        found = read(loader, numbers)
        with open(notes, "a") as out:
            row = [os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["WORLD_SIZE"], os.environ["RANK"], [*map(int, numbers)]]
            out.write(json.dumps(row) + "\n")
        return found

    Loader.read = noted  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(main(["train", file, "--elastic"]))
