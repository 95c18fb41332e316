"""What `python -m benchmarks step` is made of: programs, XLA's schedule of them, its time line."""
