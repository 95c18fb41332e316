"""Built-in steps whose layers run two halves of their batch, one's collectives beside the other.

For `step --program=benchmarks.steps.two_batches:tensor` and the like.
"""

import functools

from benchmarks.steps import programs
from pallas_collectives import two_batch_overlap

tensor, fsdp_tensor = (
    functools.partial(program, wrap=two_batch_overlap)
    for program in (programs.tensor, programs.fsdp_tensor)
)
