"""Analysis of a rank's graph without running it: collectives and live memory."""
