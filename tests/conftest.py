"""Puts 8 simulated TPU devices (CPU devices) in place before JAX looks for any."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import jax
import pytest

import shared_gpu
import tiers

# A simulated kernel's program runs once: it is compiled with little ado.
_QUICKLY_COMPILED = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
)
if jax.__version_info__ < (0, 11):  # it has simpler emitters still
    _QUICKLY_COMPILED += " --xla_cpu_use_fusion_emitters=false"
else:
    _QUICKLY_COMPILED += (
        " --xla_disable_hlo_passes=simplification"
        " --xla_cpu_enable_concurrency_optimized_scheduler=false"
    )

ANY_TIER = "not gpu and not slow"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help="K/N: of the full tier, the quick tests and part K of the rest")


def pytest_configure(config: pytest.Config) -> None:
    # libtpu only compiles here: it need not ask a metadata server, and several processes may.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if config.option.markexpr == "quick" and all("::" in name for name in config.args):
        config.option.markexpr = ANY_TIER
    if config.option.markexpr == "full":  # a test that is marked so may have rows for GPUs
        config.option.markexpr = f"full and {ANY_TIER}"
    if config.option.markexpr == "gpu":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast stays off on shared hosts
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # for the tests' processes
        shared_gpu.join()
        return
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_QUICKLY_COMPILED}".strip()
    jax.config.update("jax_traceback_in_locations_limit", 0)  # a tenth of the time to lower
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # for processes of the tests
    import pallas_collectives

    os.environ.setdefault("PJRT_NPROC", "32")  # a device of two cores takes twice the threads
    pallas_collectives.simulate(8)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is in the tiers `quick`, `full` and `slow`; `tiers` says what is."""
    if not any("::" in name for name in config.args):
        tiers.check(items)
    in_a_tier = [
        i for i in items if not any(i.iter_markers("gpu")) and not any(i.iter_markers("slow"))
    ]
    full, quick = tiers.full(in_a_tier), tiers.quick(in_a_tier)
    if (part := config.option.part) is not None:
        full = quick | tiers.part(full, part)
    for item in in_a_tier:
        item.add_marker("full" if item in full else "slow")
        if item in quick:
            item.add_marker("quick")


def pytest_collection_finish() -> None:
    """Tracing makes millions of objects, and JAX's modules live on: do not scan those each time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """What a test sets in the environment ends with it: another's processes would inherit it.

    A number of simulated devices, for one: with that of a large slice each starts 16000 threads.
    """
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    os.environ.update(before)
    for name in after.keys() - before.keys():
        del os.environ[name]


@pytest.fixture(params=["written out", "looped"])
def hops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether every hop of a pipeline is an instruction of its own, or they are a loop."""
    from pallas_collectives.overlap import array_pipelines

    if request.param == "looped":
        monkeypatch.setattr(array_pipelines, "UNROLLED_UP_TO", 1)
    return request.param


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def by_nccl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the NCCL backend serves: over the wire of host memory, or on GPUs."""
    import jax

    import nccl_host

    if request.param == "host":
        nccl_host.serve(monkeypatch)
    elif jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    return request.param


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """`python -m benchmarks` in this process: a `benchmarking.Bench`."""
    import benchmarking

    return benchmarking.in_process(monkeypatch, capsys)


@pytest.fixture
def fresh_counts() -> None:
    """What `counts` and `fallback_counts` tell is of this test alone."""
    import pallas_collectives

    pallas_collectives.reset_counts()


@pytest.fixture
def modelled_table_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names no table that would take the modelled one's place."""
    from pallas_collectives.tuning import choice

    monkeypatch.delenv(choice.ENVIRONMENT_VARIABLE, raising=False)
