//! Reads policy files in the order given and prints what is wrong with them, or the merged policy.
//!
//! `cargo run -p gpuquota-policy --example check -- FILE...`

use std::process::ExitCode;

use gpuquota_policy::{Layer, Policy, Source};

fn main() -> ExitCode {
    let mut sources = Vec::new();
    for path in std::env::args_os().skip(1) {
        match std::fs::read(&path) {
            Ok(text) => sources.push(Source::new(path, Layer::Admin, text)),
            Err(error) => {
                eprintln!("{}: {error}", path.display());
                return ExitCode::FAILURE;
            }
        }
    }
    match Policy::load(&sources, None) {
        Ok(loaded) => {
            for warning in &loaded.warnings {
                eprintln!("{warning}");
            }
            print!("{}", loaded.policy.to_toml());
            ExitCode::SUCCESS
        }
        Err(found) => {
            eprintln!("{found}");
            ExitCode::from(78)
        }
    }
}
