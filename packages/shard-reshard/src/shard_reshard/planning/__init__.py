"""Plans as callers build and read them.

`planner` resolves layouts and builds a validated plan, `analyze` is the class with reports, `picture` a page. They
build on `lowering` and report its steps and buffers.
"""
