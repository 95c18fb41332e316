"""Small kernels that measure, one figure each, what the model of a pod has to assume.

`local.py` and `wire.py` hold the kernels: read them first. `clock.py` times one, on the hardware or
by replay on a machine whose figures are known. `estimates.py` turns times into a `Machine`.
`spaces.py` and `risky.py` ask what has no time: whether data arrive whole whatever memory XLA
chooses, which devices a DMA reaches, and how many barrier semaphores there are. `certify` runs all
of them, on slices of one host.

Every figure is a slope: the same program with two counts of repetitions, the difference of the
times over that of the counts. So neither the dispatch nor what runs once is in it.
"""
