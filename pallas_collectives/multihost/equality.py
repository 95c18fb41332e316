"""Whether all processes hold the same values, and if not, where they part."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_collectives.multihost import wire
from pallas_collectives.multihost.agreement import DEFAULT_TIMEOUT, Agreement, agree
from pallas_collectives.multihost.errors import ProcessMismatchError, name_processes
from pallas_collectives.multihost.leaves import Bytes, Leaf, flatten

_SHOWN = 3  # differing values shown per process
_DIGEST_BYTES = 16


def assert_equal(in_tree: Any, fail_message: str = "", *, timeout: float = DEFAULT_TIMEOUT) -> None:
    """Raises, on every process, unless all hold the same tree of values:
    `jax.experimental.multihost_utils`' function of that name.

    Values are compared as numbers: 0.0 equals -0.0. NaN equals NaN in the same place (JAX's own
    function would call a NaN unequal to itself). Only digests are compared first; devices carry
    one leaf, and that only where something differs.

    Args:
      in_tree: pytree of arrays and scalars. A global array must be replicated: each process then
        compares its own copy.
      fail_message: begins the error.
      timeout: seconds that each wait may take.

    Raises:
      ProcessMismatchError (an AssertionError): says which leaf, on which processes, and the first
        values that differ; or where structures, shapes or dtypes differ.
      ProcessTimeoutError: names the processes that did not come.
      CollectiveError: a leaf whose shards lie on several processes, so that no process holds it
        whole.

    Example:
      >>> pc.multihost.assert_equal({"seed": 7, "lr": 1e-3}, "every process reads one config")
    """
    try:
        _compare(in_tree, timeout)
    except ProcessMismatchError as error:
        # Here and not among the terms: it may name the process that passed it.
        operation = f"{fail_message}: {error.operation}" if fail_message else error.operation
        raise ProcessMismatchError(operation, error.processes, error.fault) from None


def _compare(in_tree: Any, timeout: float) -> None:
    operation = "assert_equal"
    leaves, _ = flatten(in_tree, operation)
    digests = np.zeros((len(leaves), _DIGEST_BYTES), np.uint8)
    for row, leaf in zip(digests, leaves, strict=True):
        row[:] = _digest(_comparable(leaf.local(operation)))
    everything = hashlib.sha256(digests.tobytes()).hexdigest()
    terms = [leaf.terms for leaf in leaves]
    agreement = agree(operation, terms, note=everything, timeout=timeout)
    if len(agreement.notes) > 1:
        raise _difference(agreement, leaves, digests)


def _difference(
    agreement: Agreement, leaves: list[Leaf], digests: np.ndarray
) -> ProcessMismatchError:
    """The error, the same on every process.

    The reference is the first process of the largest group that agrees. The others hold first
    their digests against its digests, then the first leaf in which any of them differs.
    """
    operation, timeout = agreement.operation, agreement.timeout
    most, *others = sorted(agreement.notes.values(), key=lambda group: (-len(group), group[0]))

    expected_digests = _from_process(most[0], agreement, digests)
    rows = np.flatnonzero((digests != expected_digests).any(axis=1))
    first = int(rows[0]) if rows.size else len(leaves)
    agreement = agree(operation, note=str(first), timeout=timeout)

    leaf = leaves[min(int(note) for note in agreement.notes)]
    value = _comparable(leaf.local(operation))
    finding = _first_differences(value, _from_process(most[0], agreement, value))
    findings = agree(operation, note=finding, timeout=timeout).notes
    details = [
        f"\n  {name_processes(processes)}: {finding}"
        for finding, processes in sorted(findings.items(), key=lambda item: item[1])
        if finding
    ]
    return ProcessMismatchError(
        operation,
        (process for group in others for process in group),
        f"differed from {name_processes(most)}, first in {leaf.terms}:{''.join(details)}",
    )


def _from_process(process: int, agreement: Agreement, value: np.ndarray) -> np.ndarray:
    expected = np.array(value)
    wire.broadcast(
        agreement,
        Bytes([expected]),
        is_source=jax.process_index() == process,
        chunk_bytes=wire.DEFAULT_CHUNK_BYTES,
        progress=None,
    )
    return expected


def _first_differences(value: np.ndarray, expected: np.ndarray) -> str:
    """The first elements that differ, or "" where none does."""

    # As bytes: both are comparable, so equal elements are equal bytes, whatever the dtype.
    def elements(array: np.ndarray) -> np.ndarray:
        return array.reshape(-1).view(np.uint8).reshape(array.size, -1)

    places = np.flatnonzero((elements(value) != elements(expected)).any(axis=1))
    if not places.size:
        return ""
    shown = []
    for place in places[:_SHOWN]:
        index = ", ".join(str(i) for i in np.unravel_index(place, value.shape))
        found, wanted = value.reshape(-1)[place], expected.reshape(-1)[place]
        shown.append(f"[{index}] is {found} and not {wanted}")
    return f"{'; '.join(shown)} ({places.size} of {value.size} differ)"


def _comparable(value: np.ndarray) -> np.ndarray:
    """A copy in which equal numbers are equal bytes: one zero, one NaN."""
    value = np.array(value, order="C")
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        parts = value.reshape(-1).view(value.real.dtype)
        return _comparable(parts).view(value.dtype).reshape(value.shape)
    if jnp.issubdtype(value.dtype, jnp.floating):
        value[value == 0] = 0
        value[np.isnan(value)] = np.nan
    return value


def _digest(value: np.ndarray) -> np.ndarray:
    buffer: Any = value  # an array is one; numpy's stubs of some versions do not say so
    return np.frombuffer(hashlib.blake2b(buffer, digest_size=_DIGEST_BYTES).digest(), np.uint8)
