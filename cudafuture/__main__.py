"""``python -m cudafuture``."""

import sys

from cudafuture.cli import main

if __name__ == "__main__":
    sys.exit(main())
