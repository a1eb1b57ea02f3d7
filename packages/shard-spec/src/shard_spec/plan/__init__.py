"""Plans. A plan has the layout of every tensor of a model. It is validated, counted and explained."""
