"""`python -m openspec.adapt train`: a draft head for a model of your own."""

import sys

from openspec.adapt.train import main

if __name__ == "__main__":
    sys.exit(main())
