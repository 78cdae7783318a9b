"""The primer alone, for machines without the command line's dependencies: python -m ultrascale.primer [LESSON ...]"""

import sys

from ultrascale.primer.run_lessons import run_lessons

sys.exit(run_lessons(sys.argv[1:]))
