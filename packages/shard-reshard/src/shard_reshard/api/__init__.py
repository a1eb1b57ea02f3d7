"""The calls. Each resolves layouts and finds or makes a `Mover`. Then it hands over local tensors."""
