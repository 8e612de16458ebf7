//! Builds the eBPF programs and hands the object to the library for embedding.

use aya_build::{Package, Toolchain};

fn main() -> anyhow::Result<()> {
    println!("cargo::rerun-if-env-changed=EBPF_TOOLCHAIN");
    // SAFETY: a build script has one thread here.
    // The exact value matters: it opens unstable features for aya-ebpf only, and keeps aya-build from asking
    // for rust-src, which a stable toolchain lacks.
    unsafe { std::env::set_var("RUSTC_BOOTSTRAP", "aya_ebpf") };
    let toolchain = std::env::var("EBPF_TOOLCHAIN").unwrap_or_else(|_| "debian-bpf".into());
    aya_build::build_ebpf(
        [Package {
            name: "gpuquota-ebpf",
            root_dir: "../enforcer-ebpf",
            ..Default::default()
        }],
        Toolchain::Custom(&toolchain),
    )
}
