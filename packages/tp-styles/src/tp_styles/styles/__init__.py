"""The styles. `base` has what they share. Each kind has a file."""
