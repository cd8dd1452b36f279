"""The Triton backend, for NVIDIA GPUs; under Triton's interpreter also for tests on a CPU."""
