"""`python -m ultrascale`, and what torchrun starts on each rank: the same as `ultrascale`."""

import sys

from ultrascale.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
