"""Plans: who sends which box to whom. Pure, and the same on every rank.

`plan` is the value, `schedule` answers what one rank sends and receives, `analyze` is the class with the convenient
methods on top. No process group, no device, no data.
"""
