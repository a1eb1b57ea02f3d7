"""Movement of tensors between ranks. `exchange` scatters and gathers. `parameter_format` has meshes and formats."""
