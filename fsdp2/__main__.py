"""``python -m fsdp2``: the same as the command ``fsdp2``."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
