"""Run ``python -m kvstore.bench``."""

import sys

from kvstore.bench import main

if __name__ == "__main__":
    sys.exit(main())
