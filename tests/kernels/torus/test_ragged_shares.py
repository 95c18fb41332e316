"""Shares of rows by what links carry: what crosses each link, how much less, alike everywhere."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harness
from pallas_collectives.kernels.torus import ragged_shares
from pallas_collectives.kernels.torus.ragged_shares import WHOLE
from pallas_collectives.topology.groups import Group


def axes(sizes: tuple[int, ...], line: bool = False) -> list[Group]:
    return [Group((name,), (size,), line=line) for name, size in zip("xyz", sizes, strict=False)]


def orders(count: int, first: bool) -> list[list[int]]:
    """The axes in turn that each part takes; the last part goes straight."""
    found = [[k for k in range(count) if k != own] for own in range(count)]
    if first:
        ahead = [[own, *others] for own, others in enumerate(found)]
        return [*ahead[1:], ahead[0]]
    return [[*others, own] for own, others in enumerate(found)]


def walked(of_parts: np.ndarray, sizes: tuple[int, ...], line: bool, first: bool) -> np.ndarray:
    """[axis, up or down, place]: rows on each link, of all pairs' parts, sent hop by hop."""
    n = of_parts.shape[1]
    found = np.zeros((len(sizes), 2, n))
    for part, start, end in itertools.product(range(len(sizes)), range(n), range(n)):
        at, to = (list(np.unravel_index(place, sizes)) for place in (start, end))
        for axis in orders(len(sizes), first)[part]:
            size = sizes[axis]
            up = (to[axis] - at[axis]) % size
            rises = (
                to[axis] > at[axis]
                if line
                else 2 * up < size or 2 * up == size * (at[axis] % 2 == 0)
            )
            while at[axis] != to[axis]:
                place = np.ravel_multi_index(at, sizes)
                found[axis, int(not rises), place] += of_parts[part, start, end]
                at[axis] = (at[axis] + (1 if rises else -1)) % size
    return found


def carried(of_parts: np.ndarray, legs: ragged_shares._Legs) -> np.ndarray:
    come = np.einsum("phls,psr->phlr", np.array(legs.senders, float), of_parts)
    return (come * legs.receivers).sum((0, 1, 3))


@pytest.mark.parametrize("first", [False, True], ids=["last axes", "first axes"])
@pytest.mark.parametrize("line", [False, True], ids=["rings", "lines"])
@pytest.mark.parametrize("sizes", [(5,), (4, 2), (3, 4), (2, 3, 4)], ids=str)
def test_links_carry_what_is_sent_over_them_hop_by_hop(
    sizes: tuple[int, ...], line: bool, first: bool
) -> None:
    n = int(np.prod(sizes))
    of_parts = np.random.default_rng(n).random((len(sizes), n, n))
    got = carried(of_parts, ragged_shares._legs(axes(sizes, line), first))
    np.testing.assert_allclose(got, walked(of_parts, sizes, line, first).reshape(-1))


@pytest.mark.parametrize("way", ["to one", "from one"])
def test_the_busiest_link_carries_much_less(way: str) -> None:
    torus, rows = axes((4, 4), line=True), np.zeros((16, 16), np.int32)
    rows[:, 0] = 100
    rows = rows if way == "to one" else rows.T
    leaves = np.bool_(way == "from one")
    end = np.asarray(ragged_shares.ends(jnp.asarray(rows), torus, jnp.asarray(True), leaves))
    shares, legs = np.diff(end, axis=0, prepend=0) / WHOLE, ragged_shares._legs(torus, bool(leaves))
    straight = carried(np.stack([0 * rows, rows]), legs).max()
    np.testing.assert_array_equal(end[-1], WHOLE)
    assert (shares >= 0).all()
    assert straight == 1200
    assert carried(shares * rows, legs).max() <= 1.1 * 750  # half of 1500 by each of two links
    unwanted = ragged_shares.ends(jnp.asarray(rows), torus, jnp.asarray(False), leaves)
    np.testing.assert_array_equal(unwanted, [np.zeros((16, 16)), np.full((16, 16), WHOLE)])


@pytest.mark.parametrize("first", [False, True])
def test_devices_of_a_chip_share_the_links_of_their_chip(first: bool) -> None:
    chips, rows = axes((2, 2)), np.random.default_rng(0).integers(0, 99, (8, 8))
    rows[:, 6:] *= 20
    both = Group(("core",), (2,), chip=True)
    of_chips = rows.reshape(4, 2, 4, 2).sum((1, 3))
    ends = (
        np.asarray(ragged_shares.ends(jnp.asarray(table), torus, *jnp.array([True, first])))
        for table, torus in ((rows, [*chips, both]), (of_chips, chips))
    )
    got, want = ends
    assert want[0].any()
    np.testing.assert_array_equal(got, want.repeat(2, 1).repeat(2, 2))


def test_all_devices_find_the_same_bits() -> None:
    legs = jax.tree.map(jnp.asarray, ragged_shares._legs(axes((2, 4)), False))
    rows = np.random.default_rng(1).integers(0, 1 << 20, (8, 8)).astype(np.int32)
    rows[:, :7] >>= 6

    def found(rows: jax.Array) -> jax.Array:
        return ragged_shares._found(rows.astype(jnp.float32), legs)

    got = harness.per_device(found, harness.mesh(2, 4))(np.tile(rows, (8, 1, 1)))
    assert (np.asarray(got)[0, 0] > 0).any()
    for one in np.asarray(got):
        np.testing.assert_array_equal(one, np.asarray(got)[0])


def test_tables_that_are_not_small_are_not_made() -> None:
    assert ragged_shares.fits(axes((16, 16)))
    assert not ragged_shares.fits(axes((16, 16, 16)))
