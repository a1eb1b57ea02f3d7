"""Acting: scatter, swap, hook. The only part of this package that communicates."""
