"""What one row of a parametrised test covers, of what its rows are to cover together."""

import itertools
import operator
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

Parameters = dict[str, Any]
# What one row of parameters covers; a tier's rows cover together all that any row does.
Covers = Callable[[Parameters], Iterable[Hashable]]


# The values that a rule names.
_named: dict[Covers, dict[str, Collection[Any]]] = {}


def dead(covers: Covers, rows: list[Parameters]) -> str:
    """What a rule names that no row has, or that it names nothing of these rows; "" if neither."""
    for name, values in _named.get(covers, {}).items():
        for value in values:
            if value not in [row[name] for row in rows]:
                return f"no row has {name}={value!r}"
    return "" if any(any(True for _ in covers(row)) for row in rows) else "it covers no row"


def each(*names: str) -> Covers:
    """Each value of these parameters is in a quick row; of `a x b`, each combination."""
    getters = [(name, operator.itemgetter(*name.split(" x "))) for name in names]

    def covers(parameters: Parameters) -> Iterable[Hashable]:
        return ((name, str(get(parameters))) for name, get in getters)

    return covers


def pairs(*names: str) -> Covers:
    """Each value of these parameters meets each of the others', in some row."""
    return each(*(" x ".join(pair) for pair in itertools.combinations(names, 2)))


def only(**values: Collection[Any]) -> Covers:
    """The rows with these values are quick."""

    def covers(parameters: Parameters) -> Iterable[Hashable]:
        if all(parameters[name] in among for name, among in values.items()):
            yield str(parameters)

    _named[covers] = values
    return covers


def some(**values: Collection[Any]) -> Covers:
    """Each of these values is in a quick row."""

    def covers(parameters: Parameters) -> Iterable[Hashable]:
        return ((n, str(parameters[n])) for n, among in values.items() if parameters[n] in among)

    _named[covers] = values
    return covers


def apart_from(covers: Covers, **values: Collection[Any]) -> Covers:
    """What the rule wants, of rows that have none of these values."""

    def covers_(parameters: Parameters) -> Iterable[Hashable]:
        if any(parameters[name] in among for name, among in values.items()):
            return ()
        return covers(parameters)

    _named[covers_] = values
    return covers_


def once(_: Parameters) -> Iterable[Hashable]:
    """One row is quick."""
    return ("a row",)
