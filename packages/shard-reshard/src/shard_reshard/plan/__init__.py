"""Plans: which rank sends which box to whom. Pure, and the same on every rank.

`plan` is the value, `schedule` answers what one rank sends and receives, `validate` says what cannot be carried out. No
process group, no device, no data.
"""
