"""`dispatch` and `combine`: what users call, inside `jax.shard_map`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_collectives import _compat, validation
from pallas_collectives.backends import choice
from pallas_collectives.errors import CollectiveError, DtypeError
from pallas_collectives.lowering import quantized
from pallas_collectives.moe import exchanges, linear, plans
from pallas_collectives.moe.plans import TokenPlan
from pallas_collectives.moe.wire import Sizes, Wire
from pallas_collectives.topology import chips, reach
from pallas_collectives.validation import AxisName, Groups
from pallas_collectives.wires import WireLike

MOST_CHOICES = 8


def dispatch(
    x: jax.Array,
    experts: jax.Array,
    axis_name: AxisName,
    *,
    num_experts: int,
    rows: int | None = None,
    exchange: str = "auto",
    wire: WireLike = None,
    wire_backward: WireLike = None,
    axis_index_groups: Groups = None,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> tuple[jax.Array, TokenPlan]:
    """Sends each token to the experts that it chooses, which lie spread over a mesh axis.

    Of E experts over n devices, device p has experts p * E/n up to (p + 1) * E/n.

    Args:
      x: (T, D): this device's tokens.
      experts: int[T, k]: the experts that each chooses, k from 1 to 8; -1 for no expert. An expert
        that a token chooses twice gets it once; both weights count. An out-of-range number found at
        run time counts as -1, and is counted in `plan.invalid`.
      axis_name: mesh axis, or tuple of axes, of n devices together.
      num_experts: E, a multiple of n.
      rows: R, the most rows that a device has room for; by default for all that could come, that is
        n * T * min(k, E/n). If more rows come than fit, rows from later devices (and later tokens
        of each) are refused, and counted in `plan.overflow` at home.
      exchange: "ragged" (tokens travel to the devices that want them, counts first), "slots" (the
        same, with all choices and no counts, each token to a place of its own), "dense" (to all:
        static, so that CUDA graphs take it). "auto" is dense with NCCL and lax. On TPUs it is slots
        for few tokens, and where the links carry less if all get all tokens; else ragged.
      wire: the numbers that tokens travel as, "float8_e4m3fn" or others (see `collectives`), each
        row with its scales behind it; None for x's own.
      wire_backward: those of x's derivative, which passes straight through rounding.
      axis_index_groups: lists of device numbers that partition the axis; each is n devices, with
        E experts, by itself.
      backend: see `collectives`.
      algorithm: the algorithm of `ragged_all_to_all`, or of `all_gather` if dense. Slots have no
        algorithms: if one is named, "auto" is not slots.

    Returns:
      rows: (R, D): the tokens that chose this device's experts: by expert, then by the device they
        come from, then in their order there; zeros behind the last.
      plan: who received what; pass it to `combine`. `plan.group_sizes` has the rows of each
        expert.

    Each token travels to each device once, however many of its experts are there. Gradients go
    back the way that the plan says: no counts are exchanged again.

    Raises:
      UnboundAxisError, CollectiveError, DtypeError, AlgorithmError, BackendError, WireError: see
        `errors`.

    Example, inside `jax.shard_map` over 8 devices:
      rows, plan = dispatch(x, experts, "x", num_experts=64)
      hidden = jax.nn.gelu(jax.lax.ragged_dot(rows, up, plan.group_sizes))  # up (8, D, H)
      y = jax.lax.ragged_dot(hidden, down, plan.group_sizes)
      out = combine(y, weights, plan, "x")

    Example, of 4 experts on two devices, each of which takes the tokens of both:
      >>> def rows_of_experts(x, experts):
      ...     rows, plan = pc.moe.dispatch(x, experts, "x", num_experts=4)
      ...     return plan.group_sizes
      >>> P, mesh = jax.sharding.PartitionSpec("x"), jax.sharding.Mesh(jax.devices()[:2], ("x",))
      >>> counted = jax.shard_map(rows_of_experts, mesh=mesh, in_specs=P, out_specs=P)
      >>> tokens, chosen = jnp.ones((4, 8)), jnp.array([[0, 1], [0, 2], [0, 3], [3, 1]])
      >>> jax.jit(counted)(tokens, chosen)
      Array([3, 2, 1, 2], dtype=int32)
    """
    ways = _wire(axis_name, axis_index_groups, backend, algorithm, wire, wire_backward)
    sizes = _sizes(x, experts, num_experts, rows, exchange, ways)
    x = quantized.sent(x, wire, axis_name, axis_index_groups, quantized.WHOLE, ways.how)
    found, visitors = plans.with_visitors(x, experts, sizes, ways)
    return linear.gather_sum(visitors, found.visitors[:, None], found.rows), found


def combine(
    y: jax.Array,
    weights: jax.Array,
    plan: TokenPlan,
    axis_name: AxisName,
    *,
    overflow: str = "share",
    wire: WireLike = None,
    wire_backward: WireLike = None,
    axis_index_groups: Groups = None,
    backend: str | None = None,
    algorithm: str | None = "auto",
) -> jax.Array:
    """Brings the experts' answers home, and adds them up by weight.

    Weights and sums are in float32, or in float64 as y is; what travels, a sum for each token and
    device, is rounded to y's dtype. Sums are added in the order of experts, so that they have the
    same bits on every run.

    Args:
      y: (R, D): answers to the rows of `dispatch`; rows behind the last are not read.
      weights: float[T, k]: the weight of each choice of each token.
      plan: as `dispatch` has made it.
      axis_name: the value given to `dispatch`, as for the last three.
      overflow: where choices did not fit: "share" gives their weight to the token's others, in
        proportion to theirs; "drop" leaves it out. A token gets zeros if nothing of it fitted.
      wire: the numbers that sums travel as, "bfloat16" (of float32) or others, as for `dispatch`.
      wire_backward: those of y's derivative; see there.
      axis_index_groups: see `axis_name`.
      backend: see `axis_name`.
      algorithm: see `axis_name`.

    Returns:
      (T, D), in y's dtype.

    Raises:
      UnboundAxisError, CollectiveError, DtypeError, AlgorithmError, BackendError, WireError: see
        `errors`.

    Example, of experts that double what they get; each token's choices weigh 1 together:
      >>> def layer(x, experts, weights):
      ...     rows, plan = pc.moe.dispatch(x, experts, "x", num_experts=4)
      ...     return pc.moe.combine(2 * rows, weights, plan, "x")
      >>> P, mesh = jax.sharding.PartitionSpec("x"), jax.sharding.Mesh(jax.devices()[:2], ("x",))
      >>> mapped = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=P, out_specs=P))
      >>> chosen = jnp.array([[0, 1], [0, 2], [0, 3], [3, 1]])
      >>> mapped(jnp.ones((4, 8)), chosen, jnp.full((4, 2), 0.5))[:, 0]
      Array([2., 2., 2., 2.], dtype=float32)
    """
    _check_answers(y, weights, plan, overflow)
    ways = _wire(axis_name, axis_index_groups, backend, algorithm, wire, wire_backward)
    sizes = plan.sizes(ways.size)
    led = _weights_of_leaders(weights.astype(linear.wide(y.dtype)), plan, overflow)
    of_words = ways.weights_there(led, plan.tables, sizes.away_words)
    of_rows = of_words.at[plan.words].get(mode="fill", fill_value=0)
    weighed = y.astype(linear.wide(y.dtype)) * of_rows[:, None]
    answers = linear.gather_sum(weighed, plan.rows, plan.visitors[:, None])
    answers = quantized.sent(
        answers.astype(y.dtype), wire, axis_name, axis_index_groups, quantized.WHOLE, ways.how
    )
    return ways.back(answers, plan.tables, sizes)


def _weights_of_leaders(weights: jax.Array, plan: TokenPlan, overflow: str) -> jax.Array:
    """(T, k): the weight of each row that a token has, at the choice that leads it."""
    k = weights.shape[1]
    kept = jnp.where(plan.kept, weights, 0)
    if overflow == "share":
        left = jnp.sum(kept, axis=1, keepdims=True)
        wanted = jnp.sum(jnp.where(plan.leader < k, weights, 0), axis=1, keepdims=True)
        cut = jnp.any((plan.leader < k) & ~plan.kept, axis=1, keepdims=True) & (left != 0)
        kept = jnp.where(cut, kept * (wanted / jnp.where(cut, left, 1)), kept)
    leads = plan.leader[:, None, :] == jnp.arange(k, dtype=jnp.int32)[None, :, None]
    return jnp.sum(jnp.where(leads, kept[:, None, :], 0), axis=2)


# What is settled, and what arguments must be ------------------------------------------------------


def _wire(
    axis_name: AxisName,
    groups: Groups,
    backend: str | None,
    algorithm: str | None,
    wire: WireLike,
    wire_backward: WireLike,
) -> Wire:
    validation.size_of(axis_name)
    mesh = jax.sharding.get_abstract_mesh().axis_names
    if mapped := [axis for axis in validation.named(axis_name) if axis not in mesh]:
        rule = "experts lie on axes of a mesh, and it is one of vmap"
        raise CollectiveError(f"axis {mapped[0]!r}", rule, "call inside jax.shard_map")
    over: dict[str, Any] = {"wire": wire, "wire_backward": wire_backward}
    how = choice.settle(axis_name, groups, backend, algorithm, **over)
    return Wire(axis_name, validation.plain_groups(groups), how, backend)


def _sizes(
    x: jax.Array, experts: jax.Array, num_experts: Any, rows: Any, exchange: str, wire: Wire
) -> Sizes:
    """The sizes of a call, if they fit together."""
    devices = wire.size
    if np.ndim(x) != 2 or np.ndim(experts) != 2 or len(x) != len(experts) or not np.size(x):
        raise CollectiveError(
            f"x of shape {np.shape(x)}, experts of shape {np.shape(experts)}",
            "x must be (T, D) and experts (T, k), with T and D of 1 or more",
            "reshape them; jax.vmap takes further dimensions",
        )
    T, k = np.shape(experts)
    dtype = jnp.result_type(experts)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise DtypeError(
            f"experts of {dtype}", "it must hold the experts' numbers, integers", "give int32"
        )
    if not 1 <= k <= MOST_CHOICES:
        rule = f"a token must have 1 to {MOST_CHOICES} choices"
        raise CollectiveError(f"experts of shape {(T, k)}", rule, "dispatch in several calls")
    if not _is_whole(num_experts) or num_experts < 1:
        rule = "it must be a whole number of 1 or more"
        raise CollectiveError(
            f"num_experts={num_experts!r}", rule, "give the number of all experts"
        )
    num_experts = int(num_experts)  # a narrow one of NumPy's would wrap
    if num_experts % devices:
        more = -(-num_experts // devices) * devices
        raise CollectiveError(
            f"num_experts={num_experts!r}",
            f"it must be a multiple of {devices}: each of {devices} devices has as many",
            f"say {more}, and give the last devices experts that no token chooses",
        )
    _check_numbers(experts, num_experts)
    each = num_experts // devices
    most = devices * T * min(k, each)
    if rows is not None and (not _is_whole(rows) or rows < min(k, each)):
        raise CollectiveError(
            f"rows={rows!r}",
            f"it must be a whole number of {min(k, each)} or more, which one token alone may need",
            f"leave it out for {most}, which is room for all that could come",
        )
    room = most if rows is None else int(rows)
    if num_experts * T >= 1 << 31 or max(most, room) >= 1 << 30:
        rule = "tokens, choices and rows are numbered in 32 bits"
        value = f"{T} tokens, {num_experts} experts and {room} rows"
        raise CollectiveError(value, rule, "split the batch over several dispatches")
    chosen = exchanges.choose(
        exchange,
        wire.how,
        wire.axis_sizes,
        tokens=T,
        experts=num_experts,
        k=k,
        rows=rows,
        reaches_all=reach.everywhere(chips.current()),
    )
    return Sizes(T, k, devices, each, room, chosen)


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check_numbers(experts: jax.Array, num_experts: int) -> None:
    """Refuses numbers that are not an expert's, if they are known while tracing."""
    if _compat.is_traced(experts):
        return
    numbers = np.asarray(experts)
    wrong = numbers[(numbers < -1) | (numbers >= num_experts)]
    if wrong.size:
        rule = f"experts are numbered from 0 to {num_experts - 1}, and -1 stands for no expert"
        remedy = "route tokens to these alone, and give -1 where a token wants fewer than k"
        raise CollectiveError(f"expert {wrong[0]} among experts", rule, remedy)


def _check_answers(y: jax.Array, weights: jax.Array, plan: TokenPlan, overflow: str) -> None:
    if not isinstance(plan, TokenPlan):
        rule = "it must be the plan that dispatch returned"
        raise CollectiveError(f"plan of type {type(plan).__name__}", rule, "pass it unchanged")
    rows, choices = np.shape(plan.visitors), np.shape(plan.kept)
    if np.ndim(y) != 2 or (len(y),) != rows:
        raise CollectiveError(
            f"y of shape {np.shape(y)}",
            f"it must be (rows, D), an answer to each of the {rows[0]} rows that dispatch gave",
            "keep rows that are not used; they are not read",
        )
    if np.shape(weights) != choices:
        value, rule = f"weights of shape {np.shape(weights)}", "there must be one per choice"
        raise CollectiveError(value, rule, f"give shape {choices}")
    for name, array in (("y", y), ("weights", weights)):
        if not jnp.issubdtype(jnp.result_type(array), jnp.floating):
            rule = "answers are weighed with real numbers"
            raise DtypeError(f"{name} of {jnp.result_type(array)}", rule, "convert it to float32")
    if overflow not in ("share", "drop"):
        raise CollectiveError(
            f"overflow={overflow!r}", "it must be 'share' or 'drop'", "pass 'share'"
        )
