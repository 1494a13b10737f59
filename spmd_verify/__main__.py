"""`python -m spmd_verify` is `spmd-verify`."""

import sys

from spmd_verify.cli import main

if __name__ == "__main__":
    sys.exit(main())
