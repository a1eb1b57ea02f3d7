"""Rules of operators: strategies to run a call on shards, one file for each family."""
