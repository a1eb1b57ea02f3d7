"""Rules of operators: the ways to run a call on shards, one file for each family."""
