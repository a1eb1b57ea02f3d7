"""Plans as callers make and read them: from what they write, with every question answered.

`planner` resolves layouts and makes a checked plan, `analyze` is the class with the convenient methods. They stand
above `lowering`, whose steps and buffers they report.
"""
