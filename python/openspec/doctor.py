"""`python -m openspec.doctor`: does this drafter fit this model?."""

import sys

from openspec.tools.doctor import main

if __name__ == "__main__":
    sys.exit(main())
