"""`python -m benchmarks`: every collective verified, timed and compiled, in nccl-tests' terms.

Commands, each a module with a `main`; `__main__` finds them:

    sweep.py        without a name: what the flags choose is measured, compiled and replayed
    certify.py      conformance, soak and sweep on new devices, in one report
    tune.py         the library's table of which algorithm is fastest where
    report.py       results as a Markdown page with plots
    compare.py      what became slower between two results
    readme.py       the tables of README.md and benchmarks/README.md

What they are made of:

    selection.py    the flags that say what to run; settings.py parses and checks them
    devices.py      the devices to run on, and what a reader of the results must know of them
    cases.py        one record per collective
    problem.py      a collective at one size: operands, program, and what must come out
    measure.py      verifies and times it on the devices, by timing.py's clocks
    fused_timed.py  products and their collective, on the devices
    soak.py         many collectives back to back
    compiled.py     compiles it for TPUs that are not there, beside lax's
    replay_rows.py  replays it on the model of a pod
    baseline.py     the options that XLA compiles lax's with; peaks.py: what the wires carry
    rows.py         the records of all these, columns.py their tables
    results.py      rows as they come, in files; tables.py, plots.py: as they are shown

A part of a run (measured, compiled, replayed) is a plan of tasks and a generator of rows.
"""
