"""The styles, one file each."""
