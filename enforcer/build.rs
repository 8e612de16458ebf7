//! Builds the eBPF programs and hands the object to the library for embedding.
//!
//! aya-build would do, but for one thing: the ledger needs atomics that return the old value, so the
//! programs are compiled for the third version of the instruction set, and aya-build sets the flags alone.

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

/// The compiler with a prebuilt `core` for BPF that `make setup` installs.
const DEFAULT_RUSTC: &str = "/usr/bin/rustc";

fn main() -> Result<()> {
    println!("cargo::rerun-if-env-changed=EBPF_RUSTC");
    for dir in ["../enforcer-ebpf", "../enforcer-common"] {
        println!("cargo::rerun-if-changed={dir}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").context("OUT_DIR is not set")?);
    let rustc = env::var_os("EBPF_RUSTC").unwrap_or_else(|| DEFAULT_RUSTC.into());
    ensure!(
        Path::new(&rustc).exists(),
        "no compiler for the eBPF programs at {}: run `make setup`, or name one in EBPF_RUSTC",
        Path::new(&rustc).display()
    );
    let target_dir = out.join("ebpf");
    let arch = env::var("CARGO_CFG_TARGET_ARCH").context("CARGO_CFG_TARGET_ARCH is not set")?;
    let status = cargo(&rustc, &arch)
        .args(["build", "--package", "gpuquota-ebpf", "--bins", "--release"])
        .args(["--target", "bpfel-unknown-none", "--target-dir"])
        .arg(&target_dir)
        .status()
        .context("cannot run cargo for the eBPF programs")?;
    ensure!(status.success(), "the eBPF programs do not build: {status}");
    for name in [
        "gpuquota-ebpf",
        "gpuquota-insight",
        "gpuquota-profile",
        "gpuquota-idle",
    ] {
        let object = target_dir.join("bpfel-unknown-none/release").join(name);
        std::fs::copy(&object, out.join(name))
            .with_context(|| format!("cannot copy {}", object.display()))?;
    }
    Ok(())
}

/// A cargo that is not told about the build it runs in, but for the network and the lock.
fn cargo(rustc: &OsString, arch: &str) -> Command {
    const SEPARATOR: char = '\x1f';
    let flags = [
        format!("--cfg=bpf_target_arch=\"{arch}\""),
        "-Ctarget-cpu=v3".to_owned(),
        "-Cdebuginfo=2".to_owned(),
        "-Clink-arg=--btf".to_owned(),
    ];
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_") && text != "CARGO_HOME" && !text.starts_with("CARGO_NET_")
            || text.starts_with("RUSTC")
            || text == "RUSTFLAGS"
        {
            command.env_remove(&name);
        }
    }
    command
        .env("RUSTC", rustc)
        // Opens the unstable features that these crates use: inline assembly and atomic intrinsics.
        .env(
            "RUSTC_BOOTSTRAP",
            "aya_ebpf,gpuquota_ebpf,gpuquota_profile,gpuquota_idle",
        )
        .env(
            "CARGO_ENCODED_RUSTFLAGS",
            flags.join(&SEPARATOR.to_string()),
        );
    command
}
