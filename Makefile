# Every target first installs what it lacks (Debian 12, rustup's stable Rust, root). `make` alone lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup build test lint bench scale demo rpm image package-test deb fuzz kernel clean

# Some machines have cargo only in its own folder, which is not on every PATH.
export PATH := $(if $(CARGO_HOME),$(CARGO_HOME),$(HOME)/.cargo)/bin:$(PATH)

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 16

setup: ## install everything that building, testing and linting needs
	@scripts/setup.sh

build: ## build gpuquotad, gpuquotactl and the simulated GPU, optimized
	@scripts/setup.sh build
	cargo build --release --workspace --exclude gpuquota-ebpf

test: ## run every test; SUITE="crates native vm" picks, V=1 shows everything
	@scripts/setup.sh build test
	@scripts/test.sh $(SUITE)

lint: ## formatting, clippy, documentation, unused dependencies, shell scripts
	@scripts/setup.sh build lint
	@scripts/lint.sh

scale: ## measure 1,000 tenants, 8 GPUs, 5,000 processes and 1,000,000 objects: memory, start, reload, CPU
	@scripts/setup.sh build test
	@scripts/prepare-host.sh
	cargo build --release --workspace --exclude gpuquota-ebpf --lib --bins --bench scale
	cargo bench --workspace --exclude gpuquota-ebpf --bench scale

bench: ## run the benchmarks
	@scripts/setup.sh build test
	@scripts/prepare-host.sh
	cargo bench --workspace --exclude gpuquota-ebpf --benches

demo: ## show quotas at work on simulated GPUs; GPU=real uses the host's
	@scripts/setup.sh build test
	@GPU=$(GPU) scripts/demo.sh

rpm: ## build the RPM package into target/rpm and try it: install, verify, upgrade, remove
	@scripts/setup.sh build package
	@scripts/rpm.sh

image: ## build a container image of the daemon from the Debian package (needs podman or docker)
	@scripts/setup.sh build package
	@scripts/image.sh

package-test: ## try the Debian package under a booted systemd in QEMU: install, quota over D-Bus, upgrade, purge; CAPS=1 drops capabilities
	@scripts/setup.sh build test package
	cargo build --workspace --exclude gpuquota-ebpf --all-targets
	PROFILE=dev ONLY=build scripts/deb.sh
	@scripts/test-systemd.sh target/debian/gpuquota_*.deb target/package/newer.deb

deb: ## build the Debian package into target/debian and try it: install, upgrade, remove, purge
	@scripts/setup.sh build package
	@scripts/deb.sh

fuzz: ## fuzz every target for FUZZ_SECONDS (60) each
	@scripts/setup.sh build fuzz
	@scripts/fuzz.sh

kernel: ## build the test kernel that has bpf_override_return (minutes)
	@scripts/setup.sh build kernel
	@scripts/build-override-kernel.sh

clean: ## remove what was built; cached kernels stay
	cargo clean
	rm -rf fuzz/target
