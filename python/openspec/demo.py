"""`python -m openspec.demo`: the embedded model answers one question, with drafts and without."""

import sys

from openspec.bench.server import leave_on_sigterm
from openspec.tools.demo import main

if __name__ == "__main__":
    leave_on_sigterm()
    sys.exit(main())
