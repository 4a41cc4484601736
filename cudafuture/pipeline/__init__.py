"""Pipeline parallelism in one process: stages on devices, micro-batches between them, schedules as tables."""
