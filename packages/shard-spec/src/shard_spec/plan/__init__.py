"""Plans: the layout of every tensor of a model, checked, counted and explained."""
