"""Steps control flow: conditionals and loops that devices may take differently."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from pallas_collectives import _compat
from pallas_collectives.replay import jaxprs, operations
from pallas_collectives.replay.stepper import Step, Stepper
from pallas_collectives.replay.values import UNKNOWN, Known, merge, take
from pallas_collectives.replay.views import DataDependent

_KERNELS = {"pallas_call", "core_map", "mpmd_map", "shard_map"}
_OF_TWINS = {"how", "spec", "ways"}  # parameters of our own collectives, which become kernels


def _is_inert(eqn: JaxprEqn) -> bool:
    """Whether control flow holds nothing to follow: it computes arrays from arrays."""
    return not any(
        inner.primitive.name in _KERNELS
        or jaxprs.works_on_refs(inner)
        or _OF_TWINS & inner.params.keys()
        for inner in (eqn, *jaxprs.equations_within(eqn))
    )


def _unknown(env: list[Any], outs: list[int]) -> None:
    for o in outs:
        env[o] = UNKNOWN


def cond(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    branches, inert = eqn.params["branches"], _is_inert(eqn)

    def step(env: list[Any], lanes: np.ndarray) -> None:
        which, *args = (env[i] for i in ins)
        if inert and (which is UNKNOWN or not stepper.inside):
            return _unknown(env, outs)
        if which is UNKNOWN:
            raise DataDependent("a conditional")
        if not isinstance(which, np.ndarray):
            branch = branches[min(max(int(which), 0), len(branches) - 1)]
            results = stepper.run(branch, args, lanes)
            for o, value in zip(outs, results, strict=True):
                env[o] = value
            return
        stepper.flush_busy(eqn, lanes)
        which = np.clip(which.astype(np.int64), 0, len(branches) - 1)
        positions = []
        parts = []
        for b in np.unique(which):
            at = np.nonzero(which == b)[0]
            whole = len(at) == len(lanes)
            operands = args if whole else [take(a, at) for a in args]
            parts.append(stepper.run(branches[b], operands, lanes if whole else lanes[at]))
            stepper.flush_busy(eqn, lanes[at])
            positions.append(at)
        for k, o in enumerate(outs):
            by_branch = [(at, part[k]) for at, part in zip(positions, parts, strict=True)]
            env[o] = merge(by_branch, len(lanes))

    return step


def scan(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    order = range(length - 1, -1, -1) if eqn.params.get("reverse") else range(length)
    inert = _is_inert(eqn)

    def slice_of(value: Any, i: int) -> Any:
        if isinstance(value, Known):
            part = value.values[:, i] if value.per_lane else value.values[i]
            if part.ndim == int(value.per_lane) and not value.per_lane:
                return part.item()
            return part if part.ndim == 1 and value.per_lane else Known(part, value.per_lane)
        return UNKNOWN

    def step(env: list[Any], lanes: np.ndarray) -> None:
        if inert and not stepper.inside:
            return _unknown(env, outs)
        n_consts, n_carry = _compat.scan_parts(eqn.params, len(ins))
        operands = [env[i] for i in ins]
        consts, xs = operands[:n_consts], operands[n_consts + n_carry :]
        carry = operands[n_consts : n_consts + n_carry]
        for i in order:
            rows = [slice_of(x, i) for x in xs]
            carry = stepper.run(body, [*consts, *carry, *rows], lanes)[:n_carry]
        stacked = [UNKNOWN] * (len(outs) - n_carry)
        for o, value in zip(outs, [*carry, *stacked], strict=True):
            env[o] = value

    return step


def while_loop(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_jaxpr, body_jaxpr = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    inert = _is_inert(eqn)

    def step(env: list[Any], lanes: np.ndarray) -> None:
        if inert and not stepper.inside:
            return _unknown(env, outs)
        args = [env[i] for i in ins]
        cond_consts, body_consts = args[:n_cond], args[n_cond : n_cond + n_body]
        carry = args[n_cond + n_body :]
        positions = np.arange(len(lanes))
        finished: list[tuple[np.ndarray, list[Any]]] = []
        while True:
            (go_on,) = stepper.run(cond_jaxpr, [*cond_consts, *carry], lanes[positions])
            if go_on is UNKNOWN and inert:
                return _unknown(env, outs)
            if go_on is UNKNOWN:
                raise DataDependent("a loop's condition")
            if isinstance(go_on, np.ndarray) and not go_on.all():
                stepper.flush_busy(eqn, lanes[positions])
                stop, stay = np.nonzero(~go_on)[0], np.nonzero(go_on)[0]
                finished.append((positions[stop], [take(c, stop) for c in carry]))
                positions = positions[stay]
                carry = [take(v, stay) for v in carry]
                cond_consts = [take(v, stay) for v in cond_consts]
                body_consts = [take(v, stay) for v in body_consts]
                if not len(positions):
                    break
            elif not isinstance(go_on, np.ndarray) and not go_on:
                finished.append((positions, carry))
                break
            carry = stepper.run(body_jaxpr, [*body_consts, *carry], lanes[positions])
        for k, o in enumerate(outs):
            parts = [(at, results[k]) for at, results in finished]
            env[o] = merge(parts, len(lanes))

    return step


def parallel_loop(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    """A vector subcore's loop, turn after turn: its turns are independent."""
    body = eqn.params["jaxpr"]
    inner, _ = jaxprs.open_jaxpr(body)
    lower, upper, step_by, constants, carried = operations.parallel_loop(eqn)

    def step(env: list[Any], lanes: np.ndarray) -> None:
        def value(item: Any) -> Any:
            return env[ins[item.index]] if isinstance(item, operations.Slot) else item

        bounds = [value(item) for item in (lower, upper, step_by)]
        if any(bound is UNKNOWN for bound in bounds):
            raise DataDependent("a loop's bounds")
        if any(isinstance(bound, np.ndarray) for bound in bounds):
            raise jaxprs.UnsupportedEquation("replay wants the same bounds on all subcores", eqn)
        carry = [value(item) for item in carried]
        captured = [value(item) for item in constants]
        taken = captured[len(inner.constvars) :]  # by a jaxpr whose constants are its operands
        for i in range(*map(int, bounds)):
            carry = stepper.run(body, [*taken, i, *carry], lanes, captured)
        for o, out in zip(outs, carry, strict=True):
            env[o] = out

    return step
