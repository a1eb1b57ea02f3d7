"""From patterns and styles to a decision for every module, without a process group."""
