"""The primer by itself, for machines that lack what the command line needs: python -m ultrascale.primer [LESSON ...]"""

import sys

from ultrascale.primer.tell import tell

sys.exit(tell(sys.argv[1:]))
