"""Plans: the layout of every tensor of a model, validated, counted and explained."""
