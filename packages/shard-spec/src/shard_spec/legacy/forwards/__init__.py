"""The forwards of sharded modules: local batches in, the outputs of the concatenated batch out."""
