"""Run ``python -m kvstore.status``."""

import sys

from kvstore.status import main

if __name__ == "__main__":
    sys.exit(main())
