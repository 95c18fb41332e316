"""Steps what makes refs: scopes within kernels, arrays that programs mutate, barrier semaphores."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from pallas_collectives.replay import jaxprs, names
from pallas_collectives.replay.memory import LIMITED
from pallas_collectives.replay.program import Unscope, barrier_name
from pallas_collectives.replay.stepper import Step, Stepper
from pallas_collectives.replay.values import UNKNOWN
from pallas_collectives.replay.views import View


def run_scoped(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    jaxpr, _ = jaxprs.open_jaxpr(eqn.params["jaxpr"])
    ref_names = names.of_refs(jaxpr)

    def step(env: list[Any], lanes: np.ndarray) -> None:
        assert stepper.kernel is not None, "run_scoped outside a kernel"
        if eqn.params.get("collective_axes"):
            raise jaxprs.UnsupportedEquation("replay does not know what cores allocate as one", eqn)
        views = []
        for i, var in enumerate(jaxpr.invars):
            key = (id(eqn), i, stepper.kernel_number)
            name = f"{ref_names[i] or f'ref {i}'} (scoped)"
            views.append(stepper.allocate(key, var.aval, name))
        kernel, held = stepper.kernel, [v.buffer for v in views]
        kernel.held.take(held, stepper.source(eqn).line)
        around, kernel.scopes = kernel.scopes, (*kernel.scopes, id(eqn))
        own, scopes = [b for b in held if b.space in LIMITED], kernel.scopes
        for left, others in kernel.left.items():
            if left[: len(scopes)] != scopes:  # not one within this
                others += [buffer for buffer in own if buffer not in others]
        results = stepper.run(jaxpr, views, lanes, [env[i] for i in ins])
        if own:
            others = kernel.left.setdefault(scopes, [])
            source, busy = stepper.source(eqn), stepper.take_busy(waits=False)
            stepper.emit(Unscope(lanes, busy, source, own, others))
        kernel.scopes = around
        kernel.held.give_back(held)
        for o, value in zip(outs, results, strict=True):
            env[o] = value

    return step


def _array(stepper: Stepper, key: Any, aval: Any, name: str, value: Any, lanes: np.ndarray) -> View:
    """A ref to an array in HBM that no kernel has made."""
    view = stepper.allocate(key, aval, name, "hbm")
    stepper.follow(view, aval, value, lanes)
    return view


def run_state(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    jaxpr, _ = jaxprs.open_jaxpr(eqn.params["jaxpr"])
    ref_names = names.of_refs(jaxpr)

    def step(env: list[Any], lanes: np.ndarray) -> None:
        refs = [
            _array(stepper, (id(eqn), i), v.aval, ref_names[i] or f"state{i}", env[ins[i]], lanes)
            for i, v in enumerate(jaxpr.invars)
        ]
        stepper.run(jaxpr, refs, lanes)
        for o in outs:
            env[o] = UNKNOWN

    return step


def new_ref(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    aval = eqn.outvars[0].aval

    def step(env: list[Any], lanes: np.ndarray) -> None:
        value = env[ins[0]] if ins else UNKNOWN
        env[outs[0]] = _array(stepper, id(eqn), aval, "ref", value, lanes)

    return step


def freeze(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    def step(env: list[Any], lanes: np.ndarray) -> None:
        for o in outs:
            env[o] = UNKNOWN

    return step


def get_global(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    aval = eqn.params["what"]

    def step(env: list[Any], lanes: np.ndarray) -> None:
        key = (id(eqn), stepper.kernel_number)
        env[outs[0]] = stepper.allocate(key, aval, f"global@{stepper.source(eqn).line}")

    return step


def barrier_semaphore(stepper: Stepper, eqn: JaxprEqn, ins: list[int], outs: list[int]) -> Step:
    aval = eqn.outvars[0].aval

    def step(env: list[Any], lanes: np.ndarray) -> None:
        number = stepper.collective_id
        key = ("barrier", number, eqn.params.get("tag"))
        env[outs[0]] = stepper.allocate(key, aval, barrier_name(number))

    return step
