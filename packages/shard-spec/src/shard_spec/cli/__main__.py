"""``python -m shard_spec.cli``."""

import sys

from shard_spec.cli.main import main

sys.exit(main())
