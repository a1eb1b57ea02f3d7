"""Convert layouts of parameters to styles (extra `[shard-spec]`); refuse splits not proven to be valid."""
