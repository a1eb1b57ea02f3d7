"""From layouts of parameters to styles (extra `[shard-spec]`): nothing is divided that was not seen to be divisible."""
