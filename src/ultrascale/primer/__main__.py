"""The primer by itself, for machines that lack what the command line needs: python -m ultrascale.primer [LESSON ...]"""

import sys

from ultrascale.primer.run_lessons import run_lessons

sys.exit(run_lessons(sys.argv[1:]))
