"""The C++ kernels for CPUs. The extension `_native` may be missing; `forerun.kernels.select` copes with that."""
