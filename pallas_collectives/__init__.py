"""Collective communication for JAX, written as Pallas TPU kernels."""

from importlib.metadata import version as _version

from pallas_collectives import errors as errors
from pallas_collectives import sharded as sharded
from pallas_collectives.backends.choice import use_backend as use_backend
from pallas_collectives.backends.counters import counts as counts
from pallas_collectives.backends.counters import fallback_counts as fallback_counts
from pallas_collectives.backends.counters import fusion_counts as fusion_counts
from pallas_collectives.backends.counters import reset_counts as reset_counts
from pallas_collectives.backends.slices import across_slices as across_slices
from pallas_collectives.collectives import all_gather as all_gather
from pallas_collectives.collectives import all_reduce as all_reduce
from pallas_collectives.collectives import all_to_all as all_to_all
from pallas_collectives.collectives import pbroadcast as pbroadcast
from pallas_collectives.collectives import pmax as pmax
from pallas_collectives.collectives import pmean as pmean
from pallas_collectives.collectives import pmin as pmin
from pallas_collectives.collectives import ppermute as ppermute
from pallas_collectives.collectives import pshuffle as pshuffle
from pallas_collectives.collectives import psum as psum
from pallas_collectives.collectives import psum_scatter as psum_scatter
from pallas_collectives.collectives import pswapaxes as pswapaxes
from pallas_collectives.collectives import ragged_all_to_all as ragged_all_to_all
from pallas_collectives.collectives import reduce_scatter as reduce_scatter
from pallas_collectives.explanation import explain as explain
from pallas_collectives.overlap.array_pipelines import (
    pipelined_all_gather_and_consume as pipelined_all_gather_and_consume,
)
from pallas_collectives.overlap.array_pipelines import (
    pipelined_produce_and_all_to_all as pipelined_produce_and_all_to_all,
)
from pallas_collectives.overlap.kernel_bodies import gather_and_consume as gather_and_consume
from pallas_collectives.overlap.kernel_bodies import produce_and_scatter as produce_and_scatter
from pallas_collectives.overlap.products import all_gather_matmul as all_gather_matmul
from pallas_collectives.overlap.products import matmul_reduce_scatter as matmul_reduce_scatter
from pallas_collectives.overlap.residual_norm import psum_residual_rmsnorm as psum_residual_rmsnorm
from pallas_collectives.override import override_lax as override_lax
from pallas_collectives.simulation import simulate as simulate
from pallas_collectives.topology.placement import torus as torus

__version__ = _version("pallas-collectives")
