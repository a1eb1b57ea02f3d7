"""Plain data: how a parameter is split, what a style means for a module, which steps move an activation.

Nothing here knows a process group or a device. The planner prints these values, the runtime carries them out.
"""
