"""Built-in steps whose layers run two halves of their batch, one's collectives beside the other.

For `step --program=benchmarks.steps.two_batches:tensor` and the like. In `tensor_at_once` all four
layers are one turn, so that nothing waits between them.
"""

import functools

from benchmarks.steps import programs
from pallas_collectives import two_batch_overlap

tensor, tensor_at_once, fsdp_tensor = (
    functools.partial(program, wrap=two_batch_overlap)
    for program in (programs.tensor, programs.tensor_at_once, programs.fsdp_tensor)
)
