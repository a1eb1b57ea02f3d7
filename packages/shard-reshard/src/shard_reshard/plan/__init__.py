"""Plans. A plan says which rank sends which box to which rank. It is pure, and the same on every rank."""
