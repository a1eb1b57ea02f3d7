"""Plans: which rank sends which box to whom. Pure, and the same on every rank."""
