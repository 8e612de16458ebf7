//! The workload.
