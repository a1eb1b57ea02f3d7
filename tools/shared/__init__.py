"""Sources shared by all packages, each with relative links to the files that it uses.

Each wheel carries its own copy of the files, so packages stay installable alone and no pins conflict.
Modules in here import each other relatively and nothing else of this repository.
`problems` is the root; shard-reshard replaces it with the classes of shard-spec, on which it builds.
"""
