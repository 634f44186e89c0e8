"""`python -m latte.cli`, for launchers that want a module: `torchrun -m latte.cli train …`."""

import sys

from latte.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
