"""The transfer plan brings every target every element of its box exactly once."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_collectives.nccl import boxes


def grid(shape, splits, first, replicas):
    """Devices (numbered from `first`) -> boxes, of an array split `splits` ways per dimension."""
    cells = [[]]
    for n, k in zip(shape, splits, strict=True):
        step = -(-n // k)
        edges = [(min(i * step, n), min((i + 1) * step, n)) for i in range(k)]
        cells = [[*cell, edge] for cell in cells for edge in edges]
    boxes_ = [tuple(cell) for cell in cells] * replicas
    return {first + i: box for i, box in enumerate(boxes_)}


@st.composite
def moves(draw):
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.integers(1, 8)) for _ in range(rank))

    def side(first):
        splits = tuple(draw(st.integers(1, 3)) for _ in range(rank))
        return grid(shape, splits, first, draw(st.integers(1, 2)))

    return shape, side(0), side(draw(st.sampled_from([0, 3, 100])))


@settings(deadline=None, max_examples=300)
@given(moves())
def test_every_element_arrives_once_and_from_where_it_is(move):
    shape, have, need = move
    whole = np.arange(np.prod(shape)).reshape(shape)
    arrived = {d: np.full([b - a for a, b in box], -1, whole.dtype) for d, box in need.items()}
    pieces = boxes.plan(have, need)
    for piece in pieces:
        held = have[piece.source]
        assert all(h[0] <= p[0] and p[1] <= h[1] for p, h in zip(piece.box, held, strict=True))
        place = tuple(slice(*edge) for edge in boxes.within(piece.box, need[piece.target]))
        assert (arrived[piece.target][place] == -1).all(), "an element comes twice"
        arrived[piece.target][place] = whole[tuple(slice(*edge) for edge in piece.box)]
    for device, box in need.items():
        np.testing.assert_array_equal(arrived[device], whole[tuple(slice(*edge) for edge in box)])


def test_a_target_that_holds_the_box_copies_its_own():
    have = {0: ((0, 4),), 1: ((0, 4),)}
    assert boxes.plan(have, {1: ((1, 3),)}) == [boxes.Piece(1, 1, ((1, 3),))]


def test_replicas_share_the_sending():
    have = {0: ((0, 4),), 1: ((0, 4),)}
    need = dict.fromkeys(range(2, 6), ((0, 4),))
    sources = [piece.source for piece in boxes.plan(have, need)]
    assert sorted(sources) == [0, 0, 1, 1]


def test_two_halves_from_four_quarters_are_two_pieces_each():
    have = grid((8, 2), (4, 1), 0, 1)
    need = grid((8, 2), (2, 1), 10, 1)
    pieces = boxes.plan(have, need)
    assert [(p.source, p.target) for p in pieces] == [(0, 10), (1, 10), (2, 11), (3, 11)]
    assert all(boxes.size(p.box) == 4 for p in pieces)


def test_box_of_an_index_with_open_slices():
    assert boxes.box_of((slice(None), slice(2, 4)), (3, 4)) == ((0, 3), (2, 4))
