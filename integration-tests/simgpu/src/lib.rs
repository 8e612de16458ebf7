//! A simulated GPU.
