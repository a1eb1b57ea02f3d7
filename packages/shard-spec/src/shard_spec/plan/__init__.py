"""Plans: what a user or a planner decided about every tensor of a model, checked, counted and explained."""
