"""Plans: the boxes sent between ranks. Pure, and equal on every rank.

`plan` is the value, `schedule` derives one rank's sends and receives, `validate` finds reasons against execution. No
process group, no device, no data.
"""
