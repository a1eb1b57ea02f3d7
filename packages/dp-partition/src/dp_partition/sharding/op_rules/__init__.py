"""Rules of operators: strategies to run a call on shards. `table` keeps them. Each family has a file."""
