"""Movement of tensors between ranks. `mesh_cache` has groups and meshes. `exchange` scatters and gathers."""
