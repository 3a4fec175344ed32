"""Devices behind one small protocol: CUDA and ROCm, any other accelerator, and a simulated one."""
