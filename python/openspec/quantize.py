"""`python -m openspec.quantize`: a bfloat16 checkpoint as one in FP8."""

import sys

from openspec.tools.quantize import main

if __name__ == "__main__":
    sys.exit(main())
