"""What holds for every test."""

import os

# Before torch is loaded: OpenMP threads that meet on a core, a test's and a driver's, cost up to ten times.
os.environ.setdefault("OMP_NUM_THREADS", "1")
