"""What sharding costs, side by side with others: one command per question (`python -m benchmarks.step --help`)."""

import os

# Before torch is imported: its profiler writes to the terminal when it starts and when it stops.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
