"""`python -m stowplan` is the command `stowplan`."""

import sys

from stowplan.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
