"""Built-in steps whose products run with their collective in one kernel.

For `step --program=benchmarks.steps.fused_products:tensor` and the like.
"""

import functools

from benchmarks.steps import programs
from pallas_collectives import all_gather_matmul, matmul_reduce_scatter, two_batch_overlap

tensor = functools.partial(
    programs.tensor,
    into=functools.partial(all_gather_matmul, axis_name="x", gather_axis=1),
    out_of=functools.partial(matmul_reduce_scatter, axis_name="x", scatter_axis=1),
)
two_batches = functools.partial(tensor, wrap=two_batch_overlap)
