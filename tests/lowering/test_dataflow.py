"""What is made of a turn's values, and through which steps; and its steps in order."""

from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pallas_collectives.lowering.dataflow import Dataflow, origins
from pallas_collectives.lowering.turns import Flat, Step, Value


def barrier(reads: tuple[Any, ...], writes: tuple[int, ...]) -> Step:
    return Step(None, reads, writes)


FIRST, SECOND, BOTH = barrier((1, 2), (3, 4)), barrier((4,), (5,)), barrier((3, 5), (6, 7))
TURN = Dataflow([FIRST, SECOND, BOTH])


def test_readers_are_in_the_programs_order_each_once() -> None:
    assert TURN.readers([5, 4, 3]) == [SECOND, BOTH]
    assert TURN.readers([7, 8]) == []


def test_what_is_made_of_a_value_is_found_through_those_asked_for() -> None:
    assert TURN.descendants([4]) == [4, 5, 6, 7]
    assert {*TURN.descendants([1])} == {1, *range(3, 8)}, "whatever else a step reads"
    assert TURN.descendants([1], through=lambda step: step is FIRST) == [1, 3, 4]


def test_what_a_value_is_made_of_is_found_through_those_asked_for() -> None:
    assert TURN.ancestors([5]) == [5, 4, 1, 2], "the nearest first"
    assert TURN.ancestors([6], through=lambda step: step is BOTH) == [6, 3, 5]


def test_the_origin_of_a_value_is_what_it_was_in_front_of_barriers() -> None:
    found = origins([FIRST, SECOND, BOTH])
    assert [found.get(value) for value in (6, 7, 1, 8)] == [1, 2, None, None]
    assert 2 not in origins([barrier((Value(0.0), 1), (2, 3))]), "of a constant"


def equations(fn: Any, *args: Any) -> list[Step]:
    """A function's equations as steps, its arguments and values numbered."""
    closed = jax.make_jaxpr(fn)(*args)
    flat = Flat.of(closed)
    flat.add(closed, flat.numbers(len(closed.jaxpr.invars)))
    return flat.steps


def test_parts_have_the_origin_of_the_whole_and_sums_their_own() -> None:
    split, added = equations(lambda x: jnp.negative(lax.split(x, (1, 2))[1]), jnp.ones(3))
    found = origins([split, added])
    assert len(split.writes) == 2 and {found[part] for part in split.writes} == {*split.reads}
    assert added.writes[0] not in found


def test_steps_in_place_of_others_stand_where_the_first_stood() -> None:
    alone = [barrier((value,), (value + 10,)) for value in (1, 2, 3)]
    turn = Dataflow(alone)
    both = barrier((1,), (11,)), barrier((3,), (13,))
    turn.replace([alone[0], alone[2]], both)
    assert turn.in_order() == [*both, alone[1]]
    assert turn.readers([1, 3]) == [*both] and turn.makers[13] is both[1]


def test_a_step_in_place_of_others_stands_behind_what_it_needs() -> None:
    turn = Dataflow([FIRST, SECOND, BOTH])
    one = barrier((1, 5), (6, 7))
    turn.replace([FIRST, BOTH], [one])
    turn.replace([SECOND], [barrier((2,), (5,))])
    assert turn.in_order()[1] is one and len(turn.in_order()) == 2


@given(st.lists(st.lists(st.integers(0, 11), max_size=3), max_size=12), st.randoms())
@settings(max_examples=200, deadline=None)
def test_steps_come_behind_what_they_need(reads: list[list[int]], chance: Any) -> None:
    """Whatever order they stand in; and as they stand where that is in order already."""
    steps = [barrier(tuple(r % (i + 1) for r in each), (i + 1,)) for i, each in enumerate(reads)]
    assert Dataflow(steps).in_order() == steps
    chance.shuffle(steps)
    found = Dataflow(steps).in_order()
    assert len(found) == len(steps)
    made = {0}
    for step in found:
        assert made.issuperset(step.reads)
        made |= {*step.writes}
