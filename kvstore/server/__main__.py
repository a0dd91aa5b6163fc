"""Run ``python -m kvstore.server``."""

import sys

from kvstore.server import main

if __name__ == "__main__":
    sys.exit(main())
