"""Movement of tensors between ranks: groups and meshes in any order, scatter and gather, and consensus."""
