"""`python -m openspec.convert_drafter`: a draft model that openspec can read."""

import sys

from openspec.tools.convert_drafter import main

if __name__ == "__main__":
    sys.exit(main())
