//! Serves simulated GPUs at a directory until it is told to stop.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, bail};
use clap::Parser;
use gpuquota_simgpu::bytes::parse_size;
use gpuquota_simgpu::libraries::{Links, built_directory};
use gpuquota_simgpu::scheduler::Timing;
use gpuquota_simgpu::server;
use gpuquota_simgpu::sim::{CONTEXT_HIDDEN, CONTEXT_OVERHEAD, Config, GpuConfig};

/// Serve simulated NVIDIA GPUs: nvidiactl, nvidia0 … and nvidia-uvm in one directory.
///
/// Prints the line "ready" once the files can be opened. Ends and unmounts on SIGTERM and SIGINT.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Directory to mount at; made if it is missing.
    #[arg(long)]
    dir: PathBuf,
    /// Number of GPUs.
    #[arg(long, default_value_t = 2)]
    gpus: u32,
    /// Memory of each GPU.
    #[arg(long, default_value = "16GiB", value_parser = parse_size)]
    memory: u64,
    /// UUID of a GPU, in order; those left out get a fixed one.
    #[arg(long, value_parser = GpuConfig::parse_uuid)]
    uuid: Vec<[u8; 16]>,
    /// Marketing name of the GPUs.
    #[arg(long, default_value = "Simulated H200")]
    name: String,
    /// What NVML shows for a process that has a context and nothing else.
    #[arg(long, default_value_t = CONTEXT_OVERHEAD, value_parser = parse_size)]
    context_overhead: u64,
    /// The part of it that the driver takes by itself.
    #[arg(long, default_value_t = CONTEXT_HIDDEN, value_parser = parse_size)]
    context_hidden: u64,
    /// Cost of a switch between two processes, microseconds.
    #[arg(long, default_value_t = 200)]
    switch_us: u64,
    /// Directory in which to put libcuda.so.1 and libnvidia-ml.so.1, links to those built beside this program.
    #[arg(long)]
    libs: Option<PathBuf>,
    /// File to write every answered call to, in the form of the recordings.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// File to write to what the driver would write to the kernel's log, in the form of /dev/kmsg.
    #[arg(long)]
    kernel_log: Option<PathBuf>,
    /// End when standard input ends, so that a starter that dies takes the server with it.
    #[arg(long)]
    exit_with_stdin: bool,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("simgpu: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> anyhow::Result<()> {
    if args.gpus == 0 || args.gpus > 64 {
        bail!("--gpus {}: 1 to 64", args.gpus);
    }
    if args.uuid.len() > args.gpus as usize {
        bail!("{} UUIDs for {} GPUs", args.uuid.len(), args.gpus);
    }
    std::fs::create_dir_all(&args.dir)
        .with_context(|| format!("cannot make {}", args.dir.display()))?;
    let dir = args
        .dir
        .canonicalize()
        .with_context(|| format!("cannot find {}", args.dir.display()))?;
    let gpus = (0..args.gpus)
        .map(|index| {
            let mut gpu = GpuConfig::numbered(index, args.memory);
            gpu.name.clone_from(&args.name);
            if let Some(uuid) = args.uuid.get(index as usize) {
                gpu.uuid = *uuid;
            }
            gpu
        })
        .collect();
    let config = Config {
        gpus,
        context_overhead: args.context_overhead,
        context_hidden: args.context_hidden.min(args.context_overhead),
        timing: Timing {
            switch_ns: args.switch_us * 1000,
            ..Timing::default()
        },
    };
    let links = match &args.libs {
        None => None,
        Some(libs) => Some(
            built_directory()
                .and_then(|built| Links::create(&built, libs))
                .with_context(|| format!("cannot put the libraries into {}", libs.display()))?,
        ),
    };
    let left = Arc::new(Left {
        dir: dir.clone(),
        links: Mutex::new(links),
    });
    clean_up_at_signals(Arc::clone(&left))?;
    if args.exit_with_stdin {
        let left = Arc::clone(&left);
        std::thread::Builder::new()
            .name("stdin".into())
            .spawn(move || {
                let mut buf = [0; 64];
                while matches!(std::io::stdin().read(&mut buf), Ok(1..)) {}
                left.end()
            })?;
    }
    let create = |path: &PathBuf| {
        std::fs::File::create(path).with_context(|| format!("cannot write {}", path.display()))
    };
    let trace = args.trace.as_ref().map(create).transpose()?;
    let kernel_log = args.kernel_log.as_ref().map(create).transpose()?;
    let result = server::serve(&dir, config, trace, kernel_log, || {
        let mut out = std::io::stdout();
        // Nobody may be listening; the server works all the same.
        let _ = writeln!(out, "ready").and_then(|()| out.flush());
    });
    // Already unmounted is the usual case.
    let _ = server::unmount(&dir);
    result.with_context(|| format!("{} ended", dir.display()))
}

/// What must not be left behind.
struct Left {
    dir: PathBuf,
    links: Mutex<Option<Links>>,
}

impl Left {
    /// Cleans up and ends the process: open files of others get ENOTCONN from then on.
    fn end(&self) -> ! {
        if let Err(error) = server::unmount(&self.dir) {
            eprintln!("simgpu: cannot unmount {}: {error}", self.dir.display());
        }
        drop(
            self.links
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
        );
        std::process::exit(0)
    }
}

/// Blocks the signals that end the server, and cleans up on a thread of its own when one comes.
fn clean_up_at_signals(left: Arc<Left>) -> anyhow::Result<()> {
    // SAFETY: the set is initialised by sigemptyset before it is used; all pointers are to locals.
    let set = unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            libc::sigaddset(&raw mut set, signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        set
    };
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            let mut signal = 0;
            // SAFETY: `set` and `signal` live in this closure.
            unsafe { libc::sigwait(&raw const set, &raw mut signal) };
            left.end()
        })?;
    Ok(())
}
