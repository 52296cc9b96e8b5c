"""Running a step: the runner, attention backends, native kernels."""
