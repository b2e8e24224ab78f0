"""`python -m openspec.demo`: the embedded model answers one question, with drafts and without."""

import sys

from openspec.tools.demo import main

if __name__ == "__main__":
    sys.exit(main())
