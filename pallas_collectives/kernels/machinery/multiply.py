"""Products of a kernel with one w, one behind another, tile by tile through VMEM.

    out[a] = scale * (x[a] @ w + terms[0][a] + ...)        x: (A, rows, K) or (A, K, rows)
                                                           w: (K, N) or (N, K)

What a product is and what its tiles are `product` says. Tiles of x, of w and of results have two
places each, resident weights one for each tile of columns, and two more where not all of these
stay: while a step multiplies, the next one's
tiles come and the last one's result leaves. That goes on from product to product: at the last step
of one the first tiles of the next are sent for, and results are waited for where their place is
wanted again, or in `settle`. A product's first terms come when it has begun.

    fetch(x)                            first tiles of the first product
    multiply(x, out, terms, follow)     its last step calls follow(), which may
        fetch(x)                        those of the second
    multiply(x, out, terms, follow)
    settle(out)                         all results are in HBM
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import PrecisionLike

from pallas_collectives.annotations import DType, Flag, Number, Ref, Semaphore
from pallas_collectives.kernels.machinery.product import (
    Problem,
    Tiles,
    accumulator_dtype,
    across,
    fetched_anew,
    term_places,
)
from pallas_collectives.topology import groups

# Of an operand: where(act) calls act(ref) with its ref in HBM, whichever of several that is.
Where = Callable[[Callable[[Ref], None]], None]
# Of a step: where its tile is in HBM, and where in its place.
_Places = Callable[[Number], tuple[Any, Any]]
_BEGUN, _UNSETTLED = 0, 1  # in `Scratch.counts`


class Places(NamedTuple):
    """Where tiles of one operand are in VMEM."""

    tiles: Ref  # (places, *tile): VMEM
    sems: Semaphore  # (places,): own; one copy each at a time

    @classmethod
    def of(cls, count: int, tile: tuple[int, int], dtype: DType) -> "Places":
        """What to allocate."""
        return cls(pltpu.VMEM((count, *tile), dtype), pltpu.SemaphoreType.DMA((count,)))


class Scratch(NamedTuple):
    """What the products with one w take."""

    x: Places
    w: Places
    terms: list[Places]
    out: Places
    sum: Ref  # (rows, columns) of a tile: VMEM; a sum under way
    counts: Ref  # (2,): SMEM; products that have begun, and those since `settle`

    @classmethod
    def of(cls, problem: Problem, tiles: Tiles) -> "Scratch":
        """What to allocate."""
        p, t = problem, tiles
        w_tile = (t.depth if t.keep == "tile" else p.depth), t.columns
        anew = fetched_anew(p, t)
        count = 2 if t.keep == "tile" else across(p, t) - anew + (2 if anew else 0)
        result = t.rows, t.columns
        return cls(
            Places.of(2, (t.depth, t.rows) if p.turned else (t.rows, t.depth), p.x_dtype),
            Places.of(count, w_tile[::-1] if p.transposed else w_tile, p.w_dtype),
            [Places.of(term_places(p, t), result, p.out_dtype) for _ in range(p.terms)],
            Places.of(2, result, p.out_dtype),
            pltpu.VMEM(result, accumulator_dtype(p.x_dtype)),
            pltpu.SMEM((2,), jnp.int32),
        )


@dataclasses.dataclass(frozen=True)
class _Operand:
    """The tiles of one operand on their way to their places, or of the result from there."""

    name: str
    places: Places
    serves: int  # for so many steps each
    count: int  # of one product
    at: _Places  # of the tile for a step: where in HBM, where in place
    leaves: bool = False  # for HBM

    def place(self, product: Number, step: Number) -> Number:
        """The number of the place of what a step of a product takes."""
        tile = product * self.count + lax.div(step, np.int32(self.serves))
        return lax.rem(tile, np.int32(self.places.sems.shape[0]))

    def begins(self, step: Number) -> Flag:
        """Whether a step is the first that a tile serves."""
        return lax.rem(step, np.int32(self.serves)) == 0

    def fetch(self, product: Number, where: Where) -> None:
        """Starts the copies of a product's first tile."""
        self.start(product, np.int32(0), where)

    def advance(self, product: Number, step: Number, where: Where) -> None:
        """Waits for the tile for a step, which is the first that it serves, and starts the next."""
        self.wait(product, step, where)
        self.start_later(product, step + self.serves, where)

    def start_later(self, product: Number, step: Number, where: Where, if_: Flag = True) -> None:
        """`start`, if the product has such a step."""
        last = self.count * self.serves - 1
        act = functools.partial(self.start, product, jnp.minimum(step, last), where)
        groups.only_if((step <= last) & if_, act)

    def start(self, product: Number, step: Number, where: Where) -> None:
        """Starts the copy of the tile for a step."""
        self._with_copy(product, step, where, lambda copy: copy.start())

    def wait(self, product: Number, step: Number, where: Where) -> None:
        """Waits for the copy of the tile for a step."""
        with jax.named_scope(f"wait_{self.name}"):
            self._with_copy(product, step, where, lambda copy: copy.wait())

    def _with_copy(
        self, product: Number, step: Number, where: Where, act: Callable[[Any], None]
    ) -> None:
        place = self.place(product, step)
        there, here = self.at(step)

        def on(ref: Ref) -> None:
            pair = ref.at[there], self.places.tiles.at[(place, *here)]
            source, target = pair[::-1] if self.leaves else pair
            act(pltpu.make_async_copy(source, target, self.places.sems.at[place]))

        groups.only_if(self.moves(product, step), lambda: where(on))

    def moves(self, product: Number, step: Number) -> Flag:
        """Whether the tile for a step is copied, or is there."""
        del product, step
        return True


@dataclasses.dataclass(frozen=True)
class _Panels(_Operand):
    """Panels of w, which stay except each `every`-th; 0: all stay.

    Those that stay come with the first product. Of the others the next is sent for when one begins
    to serve: the one before that, whose place it takes, has served by then.
    """

    every: int = 0

    @property
    def anew(self) -> int:
        """How many each product fetches."""
        return self.count // self.every if self.every else 0

    def _number(self, step: Number) -> tuple[Any, Any, Any]:
        """A step's panel: its number, how many before it do not stay, and whether it does not."""
        panel = lax.div(step, np.int32(self.serves))
        if not self.every:
            return panel, 0, False
        return (
            panel,
            lax.div(panel, np.int32(self.every)),
            lax.rem(panel, np.int32(self.every)) == self.every - 1,
        )

    def place(self, product: Number, step: Number) -> Number:
        panel, before, passes = self._number(step)
        kept = panel - before
        if not self.every:
            return kept
        passing = self.count - self.anew + lax.rem(product * self.anew + before, np.int32(2))
        return jnp.where(passes, passing, kept)

    def moves(self, product: Number, step: Number) -> Flag:
        return self._number(step)[2] | (product == 0)

    def fetch(self, product: Number, where: Where) -> None:
        super().fetch(product, where)
        if self.every > 1:
            self.start(product, np.int32((self.every - 1) * self.serves), where)

    def advance(self, product: Number, step: Number, where: Where) -> None:
        self.wait(product, step, where)
        later = step + self.serves
        self.start_later(product, later, where, if_=~self._passes(later))
        if self.every:
            behind = step + self.every * self.serves
            self.start_later(product, behind, where, if_=self._passes(step))

    def _passes(self, step: Number) -> jax.Array:
        return jnp.asarray(self._number(step)[2])


class Products:
    """All products of a kernel with one w; see the module."""

    def __init__(
        self,
        problem: Problem,
        tiles: Tiles,
        w_ref: Ref,  # (K, N) or (N, K): HBM
        scratch: Scratch,
        precision: PrecisionLike = None,
    ) -> None:
        p, t = problem, tiles
        self._problem, self._tiles, self._scratch, self._precision = p, t, scratch, precision
        self._grid = across(p, t), p.batch, -(-p.rows // t.rows), p.depth // t.depth
        self._steps, deep = math.prod(self._grid), self._grid[3]
        self._of_w: Where = lambda act: act(w_ref)
        below = self._steps // self._grid[0]  # steps with the same columns
        of_x = self._steps if below == 1 else 1
        of_w = 1 if t.keep == "tile" and deep > 1 else below
        of_panels = {"all": 0, "some": t.every}.get(t.keep)
        self._x = self._operand("x", scratch.x, of_x, self._x_tile)
        self._w = self._operand("w", scratch.w, of_w, self._w_tile)
        if of_panels is not None:
            w = self._w
            self._w = _Panels(w.name, w.places, w.serves, w.count, w.at, every=of_panels)
        self._terms = [self._operand("term", each, deep, self._out_tile) for each in scratch.terms]
        self._out = self._operand("result", scratch.out, deep, self._out_tile, leaves=True)

    def begin(self) -> None:
        """To be called before all else."""
        self._scratch.counts[_BEGUN] = 0
        self._scratch.counts[_UNSETTLED] = 0

    def fetch(self, x: Where) -> None:
        """Starts the copies of the first tiles of the next product."""
        product = self._scratch.counts[_BEGUN]
        for operand, where in ((self._x, x), (self._w, self._of_w)):
            operand.fetch(product, where)

    def multiply(
        self,
        x: Where,
        out_ref: Ref,  # (A, rows, N): HBM
        *terms: Where,  # each as out_ref, which may be one of them
        adds: Flag = True,
        scale: float = 1.0,
        follow: Callable[[], None] = lambda: None,
    ) -> None:
        """out = scale * (x @ w + terms); `fetch` has been called for it.

        adds: whether terms count; where they do not, `terms` act on none.
        follow: called when the last step begins.
        """
        counts, last = self._scratch.counts, np.int32(self._steps - 1)
        product, unsettled = counts[_BEGUN], counts[_UNSETTLED]
        of_terms = list(zip(self._terms[: len(terms)], terms, strict=True))

        def to_out(act: Callable[[Ref], None]) -> None:
            act(out_ref)

        def step(step: Number, _: None) -> None:
            for term, where in of_terms:
                self._bring_term(term, product, step, where)
            for operand, where in ((self._x, x), (self._w, self._of_w)):
                advance = functools.partial(operand.advance, product, step, where)
                groups.only_if(operand.begins(step), advance)

            def begin_next() -> None:
                counts[_BEGUN] = product + 1
                follow()

            groups.only_if(step == last, begin_next)

            def before_result() -> None:
                for term, where in of_terms:
                    term.wait(product, step, where)
                before = unsettled * self._out.count + lax.div(step, np.int32(self._out.serves))
                groups.only_if(before >= 2, lambda: self._wait_out(before - 2, to_out))

            def finish(total: jax.Array) -> None:
                for term, _ in of_terms:
                    value = term.places.tiles[term.place(product, step)].astype(total.dtype)
                    total += value if adds is True else jnp.where(adds, value, 0)
                total = total if scale == 1.0 else total * scale
                place = self._out.place(unsettled, step)
                self._out.places.tiles[place] = total.astype(self._problem.out_dtype)
                self._out.start(unsettled, step, to_out)

            # Waits are all behind: between a product and what follows it they would keep the matrix
            # unit and the vector units from working side by side.
            groups.only_if(self._out.begins(step + 1), before_result)
            self._add_up(product, step, finish)

        lax.fori_loop(0, self._steps, step, None)
        counts[_UNSETTLED] = unsettled + 1

    def _bring_term(self, term: _Operand, product: Number, step: Number, where: Where) -> None:
        """Starts the copies of a term's tiles: a step ahead, or half-way through a sum over K.

        The latter leaves the first steps' time to the result before, which leaves then.
        """
        start, deep = functools.partial(term.start, product), self._grid[3]
        if deep > 1:
            half_way = lax.rem(step, np.int32(deep)) == deep // 2
            groups.only_if(half_way, lambda: start(step, where))
            return
        later = jnp.minimum(step + 1, self._steps - 1)
        groups.only_if(step == 0, lambda: start(step, where))
        groups.only_if(step + 1 < self._steps, lambda: start(later, where))

    def settle(self, out_ref: Ref) -> None:
        """Waits until all results are in HBM; `out_ref` is that of any."""
        counts = self._scratch.counts
        results = counts[_UNSETTLED] * self._out.count
        with jax.named_scope("settle"):
            for number in (results - 2, results - 1):
                wait = functools.partial(self._wait_out, number, lambda act: act(out_ref))
                groups.only_if(number >= 0, wait)
        counts[_UNSETTLED] = 0

    def _wait_out(self, number: Number, where: Where) -> None:
        """Waits for a result; they are counted from `settle` on."""
        count = np.int32(self._out.count)
        step = lax.rem(number, count) * self._out.serves
        self._out.wait(lax.div(number, count), step, where)

    def _add_up(self, product: Number, step: Number, finish: Callable[[Any], None]) -> None:
        """Multiplies a step's tiles; finish(sum) at the last of those that are added up."""
        p, t, sum_ref, deep = self._problem, self._tiles, self._scratch.sum, self._grid[3]
        k, slabs = lax.rem(step, np.int32(deep)), t.depth // t.inner
        x_ref = self._x.places.tiles.at[self._x.place(product, step)]
        w_ref = self._w.places.tiles.at[self._w.place(product, step)]
        contract = ((1,), (1 if p.transposed else 0,)), ((), ())

        def multiplied(slab: Number) -> jax.Array:
            start = slab * t.inner
            of_x = pl.ds(_aligned(start, t.inner), t.inner)
            left = x_ref[of_x].T if p.turned else x_ref[:, of_x]
            depths = pl.ds(_aligned(start + self._held_from(k), t.inner), t.inner)
            right = w_ref[(slice(None), depths) if p.transposed else (depths, slice(None))]
            if left.dtype != right.dtype:
                left, right = left.astype(jnp.float32), right.astype(jnp.float32)
            return lax.dot_general(
                left,
                right,
                contract,
                # Narrower numbers are multiplied in full by one pass; Mosaic refuses to be told so.
                precision=self._precision if left.dtype == jnp.float32 else lax.Precision.DEFAULT,
                preferred_element_type=sum_ref.dtype,
            )

        def add(slab: Number, _: None) -> None:
            sum_ref[...] += multiplied(slab)

        if deep == slabs == 1:
            finish(multiplied(0))
            return

        @pl.when(k == 0)
        def _() -> None:
            sum_ref[...] = jnp.zeros_like(sum_ref)

        lax.fori_loop(0, slabs, add, None)

        @pl.when(k == deep - 1)
        def _() -> None:
            finish(sum_ref[...])

    def _held_from(self, k: Number) -> Number:
        """Where in the tile of w the depth of a step begins."""
        return 0 if self._tiles.keep == "tile" or self._grid[3] == 1 else k * self._tiles.depth

    def _operand(
        self, name: str, places: Places, serves: int, at: _Places, **options: bool
    ) -> _Operand:
        return _Operand(name, places, serves, self._steps // serves, at, **options)

    def _indices(self, step: Number) -> list[Any]:
        """A step's tile of columns, number of A, tile of rows and tile of K."""
        return groups.unraveled(step, self._grid)

    def _x_tile(self, step: Number) -> tuple[Any, Any]:
        _, a, i, k = self._indices(step)
        start, size = _cut(self._problem.rows, self._tiles.rows, i)
        depths = pl.ds(_aligned(k * self._tiles.depth, self._tiles.depth), self._tiles.depth)
        if self._problem.turned:
            return (a, depths, pl.ds(start, size)), (slice(None), pl.ds(0, size))
        return (a, pl.ds(start, size), depths), (pl.ds(0, size),)

    def _w_tile(self, step: Number) -> tuple[Any, Any]:
        p, t = self._problem, self._tiles
        j, *_, k = self._indices(step)
        start, size = _cut(p.columns, t.columns, j)
        deep, k = (t.depth, k) if t.keep == "tile" else (p.depth, 0)
        there = pl.ds(_aligned(k * deep, deep), deep), pl.ds(start, size)
        here = pl.ds(0, deep), pl.ds(0, size)
        return (there[::-1], here[::-1]) if p.transposed else (there, here)

    def _out_tile(self, step: Number) -> tuple[Any, Any]:
        j, a, i, _ = self._indices(step)
        down, rows = _cut(self._problem.rows, self._tiles.rows, i)
        right, columns = _cut(self._problem.columns, self._tiles.columns, j)
        return (a, pl.ds(down, rows), pl.ds(right, columns)), (pl.ds(0, rows), pl.ds(0, columns))


def _cut(whole: int, tile: int, number: Number) -> tuple[Any, Any]:
    """Where a tile begins and its size; the last may be smaller."""
    if whole <= tile:
        return 0, whole
    start = _aligned(number * tile, tile)
    if whole % tile == 0:
        return start, tile
    return start, _aligned(jnp.minimum(tile, whole - start), math.gcd(whole, tile))


def _aligned(start: Any, size: int) -> int | jax.Array:
    return start if isinstance(start, int) else pl.multiple_of(start, size)
