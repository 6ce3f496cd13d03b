"""What holds for every test."""

import os

# Before torch is loaded: two OpenMP threads that meet on a core, as a test's and a driver's do, cost up to ten times.
os.environ.setdefault("OMP_NUM_THREADS", "1")
