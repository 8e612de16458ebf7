#!/usr/bin/env bash
# Installs what is missing on Debian 12 to build, test and check this repository. Prints one line for each thing that it
# installs and nothing when all is there. Needs root only if something is missing.
#
# usage: setup.sh [GROUP...]   groups: build test lint fuzz kernel package; default: build test lint
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

bpf_linker=0.13.0
machete=0.9.2
cargo_fuzz=0.13.2
cargo_deb=3.8.0
# The eBPF programs are compiled by Debian's own rustc, because Debian ships a prebuilt core library for the BPF target;
# bpf-linker must be built on an LLVM at least as new as that compiler's.
llvm=/usr/lib/llvm-22

packages_of() {
    case $1 in
    build) echo ca-certificates gcc libc6-dev make rustc-web libstd-rust-web-dev-bpf ;;
    linker) echo llvm-22-dev ;;
    test) echo crun fuse3 dbus-daemon binutils cpio xz-utils busybox-static qemu-system-x86 dpkg ;;
    lint) echo git rust-web-clippy shellcheck ;;
    fuzz) echo g++ ;;
    kernel) echo gcc make flex bison bc libelf-dev libssl-dev dwarves xz-utils kmod rsync cpio python3 ;;
    package) echo binutils dpkg rpm mmdebstrap ;;
    *) die "unknown group '$1'; known: build test lint fuzz kernel package" ;;
    esac
}

apt_updated=no
install_packages() {
    local missing=() installed p
    # dpkg-query fails when one of the names is unknown and prints the others all the same.
    installed=$(dpkg-query -W -f='${db:Status-Abbrev} ${Package}\n' "$@" 2>/dev/null | sed -n 's/^ii *//p' || true)
    for p in "$@"; do
        grep -qxF "$p" <<<"$installed" || missing+=("$p")
    done
    [ "${#missing[@]}" -gt 0 ] || return 0
    [ "$(id -u)" -eq 0 ] || die "missing packages: ${missing[*]}. Run 'make setup' as root."
    say "installing packages: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    if [ "$apt_updated" = no ]; then
        # A source that does not answer is no reason to stop: the others may have what is needed.
        quietly apt-get update || true
        apt_updated=yes
    fi
    quietly apt-get -o Acquire::Retries=3 install -y --no-install-recommends "${missing[@]}"
}

# install_crate NAME VERSION COMMAND-THAT-PRINTS-THE-VERSION [cargo install arguments...]
install_crate() {
    local name=$1 version=$2 probe=$3
    shift 3
    # shellcheck disable=SC2086 # the probe is a command line
    if $probe 2>/dev/null </dev/null | grep -qwF "$version"; then return 0; fi
    say "installing $name $version (built from source, takes minutes)"
    # From / because a cargo configuration of the current directory would apply to this build too.
    (cd / && unset CARGO_TARGET_DIR RUSTFLAGS && quietly cargo install "$name" --version "$version" --locked --force "$@")
}

# Unpacks a package below target/tools without installing it: one that would start a service, of which only the programs
# are wanted.
unpack_package() { # PACKAGE PROGRAM
    if command -v "$2" >/dev/null || [ -x "target/tools/usr/bin/$2" ]; then return 0; fi
    say "unpacking $1 into target/tools"
    local work
    work=$(mktemp -d)
    # apt downloads as its own user if that one may write here.
    chmod 777 "$work"
    if ! (cd "$work" && quietly apt-get download "$1"); then
        [ "$apt_updated" = yes ] || [ "$(id -u)" -ne 0 ] || quietly apt-get update || true
        apt_updated=yes
        (cd "$work" && quietly apt-get download "$1") || die "cannot download the package $1"
    fi
    mkdir -p target/tools
    dpkg-deb -x "$work"/*.deb target/tools
    rm -rf "$work"
}

if ! command -v rustup >/dev/null || ! command -v cargo >/dev/null; then
    die "rustup and a stable Rust toolchain are needed first; they are not on PATH nor in ${CARGO_HOME:-$HOME/.cargo}/bin"
fi

groups=("$@")
[ "${#groups[@]}" -gt 0 ] || groups=(build test lint)

wanted=()
for group in "${groups[@]}"; do
    read -ra some <<<"$(packages_of "$group")"
    wanted+=("${some[@]}")
done
install_packages "${wanted[@]}"

for group in "${groups[@]}"; do
    case $group in
    build)
        if ! bpf-linker --version 2>/dev/null </dev/null | grep -qwF "$bpf_linker"; then
            read -ra some <<<"$(packages_of linker)"
            install_packages "${some[@]}"
            LLVM_SYS_221_PREFIX=$llvm LLVM_PREFIX=$llvm PATH=$llvm/bin:$PATH \
                install_crate bpf-linker "$bpf_linker" "bpf-linker --version" --no-default-features --features llvm-22
        fi
        # So that a later `cargo build` needs no network.
        quietly cargo fetch
        ;;
    test)
        unpack_package prometheus promtool
        ;;
    lint)
        if ! cargo fmt --version >/dev/null 2>&1 || ! cargo clippy --version >/dev/null 2>&1; then
            say "adding rustfmt and clippy to the Rust toolchain"
            quietly rustup component add rustfmt clippy
        fi
        install_crate cargo-machete "$machete" "cargo machete --version"
        ;;
    package)
        install_crate cargo-deb "$cargo_deb" "cargo deb --version"
        ;;
    fuzz)
        install_crate cargo-fuzz "$cargo_fuzz" "cargo fuzz --version"
        ;;
    esac
done
