"""Lax's rules as ours: the primitives behind the collectives, and reductions of many operands."""
