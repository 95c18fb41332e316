"""How processes meet; threads over one store stand for them."""

import functools
import json
import time

import pytest

from nccl_host import in_threads
from pallas_collectives.nccl import rendezvous
from pallas_collectives.nccl.errors import RendezvousError
from pallas_collectives.nccl.store import LocalStore

ID = bytes(range(128))


def meet(store, process, processes=(0, 1, 2), key="k", timeout=5.0, terms="t", new_id=lambda: ID):
    return rendezvous.meet(store, key, process, processes, timeout, new_id, terms)


def all_meet(store, **kwargs):
    return in_threads(*(functools.partial(meet, store, p, **kwargs) for p in range(3)))


def test_everyone_gets_the_roots_id_and_one_nonce():
    store = LocalStore()
    first, second = all_meet(store), all_meet(store)
    assert [m.unique_id for m in first] == [ID] * 3
    assert len({m.nonce for m in first}) == 1
    assert first[0].nonce != second[0].nonce
    assert store.entries("k/") == {}, "a meeting leaves nothing behind"


def test_a_stale_answer_of_an_earlier_attempt_is_not_believed():
    store = LocalStore()
    stale = {"token": "old", "nonce": "old", "id": "00" * 128, "wrong": ""}
    for joiner in (1, 2):
        store.set(f"k/answer/{joiner}", json.dumps(stale))
    assert [m.unique_id for m in all_meet(store)] == [ID] * 3


def test_a_stale_answer_alone_ends_in_an_error_in_time():
    store = LocalStore()
    stale = {"token": "old", "nonce": "old", "id": "00" * 128, "wrong": ""}
    store.set("k/answer/1", json.dumps(stale))
    begin = time.monotonic()
    with pytest.raises(RendezvousError, match=r"process 0.*did not create.*earlier attempt"):
        meet(store, 1, timeout=0.3)
    assert time.monotonic() - begin < 2
    assert "k/hello/1" not in store.entries("k/"), "a joiner that gave up is not present"


def test_who_does_not_come_is_named():
    store = LocalStore()
    root, joiner = in_threads(
        lambda: meet(store, 0, timeout=0.5), lambda: meet(store, 1, timeout=0.5)
    )
    assert isinstance(root, RendezvousError) and "processes [2] did not come" in str(root)
    assert isinstance(joiner, RendezvousError) and "process 0" in str(joiner)


def test_other_terms_fail_everywhere():
    store = LocalStore()
    results = in_threads(
        lambda: meet(store, 0, terms="NCCL 2.28.9"),
        lambda: meet(store, 1, terms="NCCL 2.28.9"),
        lambda: meet(store, 2, terms="NCCL 2.29.1"),
    )
    assert all(isinstance(r, RendezvousError) for r in results)
    assert all("in processes {2: 'NCCL 2.29.1'}" in str(r) for r in results)


def test_alone_needs_no_store():
    assert meet(None, 0, processes=(0,)).unique_id == ID
