"""Sources of styles: names in a model's own plan, recognised blocks, plans of shard-spec, transformers' loading.

Only `transformers` imports transformers at load time.
"""
