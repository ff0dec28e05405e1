"""Data -> BoundMask: constructors, O(n) validation, and the evaluation of boundary vectors on n columns.

`constructors` and `codes` need no torch; the rest does.
"""
