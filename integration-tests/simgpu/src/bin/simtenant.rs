//! simtenant
fn main() {}
