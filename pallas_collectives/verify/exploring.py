"""Runs a kernel in JAX's interpreter under many schedules, where the replay cannot follow it."""

from __future__ import annotations


class Exploration: ...


def explore() -> None: ...
