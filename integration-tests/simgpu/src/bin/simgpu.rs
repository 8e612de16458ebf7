//! simgpu
fn main() {}
