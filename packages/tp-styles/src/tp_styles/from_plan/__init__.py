"""Convert layouts to styles (extra `[shard-spec]`). `regions` finds blocks. Splits without a proof are refused."""
