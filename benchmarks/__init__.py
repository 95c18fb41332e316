"""`python -m benchmarks`: every collective verified, timed and compiled, in nccl-tests' terms.

    settings.py     what the flags ask for
    devices.py      the devices to run on, and what a reader of the results must know of them
    cases.py        one record per collective
    measure.py      verifies and times a collective on the devices
    compiled.py     compiles it for TPUs that are not there, beside lax's
    replay_rows.py  replays it on the model of a pod
    report.py       tables, JSON and CSV

A part of the run (measured, compiled, replayed) is a generator of rows, dataclasses that say
whether they failed, and a list of columns in `report`; `__main__` runs the parts in turn.
"""
