"""The calls: each resolves layouts, finds or makes a `Mover`, and hands over local tensors."""
