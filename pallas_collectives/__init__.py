"""Collective communication for JAX, written as Pallas TPU kernels.

A name is imported when it is first asked for: `import pallas_collectives` itself imports neither
JAX nor anything else here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names, for readers, editors and type checkers
    from pallas_collectives import errors as errors
    from pallas_collectives import moe as moe
    from pallas_collectives import multihost as multihost
    from pallas_collectives import nccl as nccl
    from pallas_collectives import replay as replay
    from pallas_collectives import sharded as sharded
    from pallas_collectives import verify as verify
    from pallas_collectives.backends.choice import use_backend as use_backend
    from pallas_collectives.backends.counters import counts as counts
    from pallas_collectives.backends.counters import fallback_counts as fallback_counts
    from pallas_collectives.backends.counters import fusion_counts as fusion_counts
    from pallas_collectives.backends.counters import reset_counts as reset_counts
    from pallas_collectives.backends.counters import wire_counts as wire_counts
    from pallas_collectives.backends.overrides import override_report as override_report
    from pallas_collectives.backends.report import OverrideReport as OverrideReport
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
    from pallas_collectives.overlap.layer_scan import scan_gathered as scan_gathered
    from pallas_collectives.overlap.products import all_gather_matmul as all_gather_matmul
    from pallas_collectives.overlap.products import matmul_reduce_scatter as matmul_reduce_scatter
    from pallas_collectives.overlap.residual_norm import (
        psum_residual_rmsnorm as psum_residual_rmsnorm,
    )
    from pallas_collectives.overlap.split import Started as Started
    from pallas_collectives.overlap.split import all_gather_start as all_gather_start
    from pallas_collectives.overlap.split import all_reduce_start as all_reduce_start
    from pallas_collectives.overlap.split import all_to_all_start as all_to_all_start
    from pallas_collectives.overlap.split import pbroadcast_start as pbroadcast_start
    from pallas_collectives.overlap.split import pmax_start as pmax_start
    from pallas_collectives.overlap.split import pmean_start as pmean_start
    from pallas_collectives.overlap.split import pmin_start as pmin_start
    from pallas_collectives.overlap.split import ppermute_start as ppermute_start
    from pallas_collectives.overlap.split import pshuffle_start as pshuffle_start
    from pallas_collectives.overlap.split import psum_scatter_start as psum_scatter_start
    from pallas_collectives.overlap.split import psum_start as psum_start
    from pallas_collectives.overlap.split import pswapaxes_start as pswapaxes_start
    from pallas_collectives.overlap.split import ragged_all_to_all_start as ragged_all_to_all_start
    from pallas_collectives.overlap.split import reduce_scatter_start as reduce_scatter_start
    from pallas_collectives.overlap.two_batches import two_batch_overlap as two_batch_overlap
    from pallas_collectives.override import overridden as overridden
    from pallas_collectives.override import override_lax as override_lax
    from pallas_collectives.simulation import simulate as simulate
    from pallas_collectives.topology.placement import torus as torus
    from pallas_collectives.wires import Wire as Wire

    __version__: str

# Where the public names are.
_MODULES: dict[str, tuple[str, ...]] = {
    "backends.choice": ("use_backend",),
    "backends.counters": (
        "counts",
        "fallback_counts",
        "fusion_counts",
        "reset_counts",
        "wire_counts",
    ),
    "backends.overrides": ("override_report",),
    "backends.report": ("OverrideReport",),
    "backends.slices": ("across_slices",),
    "collectives": (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "pbroadcast",
        "pmax",
        "pmean",
        "pmin",
        "ppermute",
        "pshuffle",
        "psum",
        "psum_scatter",
        "pswapaxes",
        "ragged_all_to_all",
        "reduce_scatter",
    ),
    "explanation": ("explain",),
    "overlap.array_pipelines": (
        "pipelined_all_gather_and_consume",
        "pipelined_produce_and_all_to_all",
    ),
    "overlap.kernel_bodies": (
        "gather_and_consume",
        "produce_and_scatter",
    ),
    "overlap.layer_scan": ("scan_gathered",),
    "overlap.products": (
        "all_gather_matmul",
        "matmul_reduce_scatter",
    ),
    "overlap.residual_norm": ("psum_residual_rmsnorm",),
    "overlap.split": (
        "Started",
        "all_gather_start",
        "all_reduce_start",
        "all_to_all_start",
        "pbroadcast_start",
        "pmax_start",
        "pmean_start",
        "pmin_start",
        "ppermute_start",
        "pshuffle_start",
        "psum_scatter_start",
        "psum_start",
        "pswapaxes_start",
        "ragged_all_to_all_start",
        "reduce_scatter_start",
    ),
    "overlap.two_batches": ("two_batch_overlap",),
    "override": (
        "overridden",
        "override_lax",
    ),
    "simulation": ("simulate",),
    "topology.placement": ("torus",),
    "wires": ("Wire",),
}
_SUBMODULES = ("errors", "moe", "multihost", "nccl", "replay", "sharded", "verify")
_PLACES = {name: module for module, names in _MODULES.items() for name in names}
PUBLIC = (*_PLACES, *_SUBMODULES)
__all__ = list(PUBLIC)  # what `import *` asks for


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "__version__":
        found = importlib.import_module("importlib.metadata").version("pallas-collectives")
    elif name in _PLACES:
        found = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC, "__version__"})
