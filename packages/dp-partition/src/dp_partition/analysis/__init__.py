"""Analysis of a rank's graph without running it: collectives, live memory, time, and the page that shows them."""
