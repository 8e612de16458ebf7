//! libcuda.so.1 for the simulated GPU.
