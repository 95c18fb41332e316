"""Chips, groups of devices, their placement on a torus, and the orders of rings on its wires."""
