"""Which algorithm serves a call: predicted times and their tables."""

from pallas_collectives.tuning.choice import use_table as use_table
