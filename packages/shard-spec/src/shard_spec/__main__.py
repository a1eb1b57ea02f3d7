"""``python -m shard_spec``: the command line."""

import sys

from shard_spec.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
