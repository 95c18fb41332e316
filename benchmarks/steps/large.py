"""The steps of a model with as many numbers in a layer as those of 70 billion have.

For `step --program=benchmarks.steps.large:fsdp_tensor`.
"""

from benchmarks.steps import programs
from benchmarks.steps.programs import Form, Program


def fsdp_tensor(devices: int, form: Form) -> Program:
    """`programs.fsdp_tensor`, twice as wide."""
    return programs.fsdp_tensor(devices, form, width=8192, hidden=28672)
