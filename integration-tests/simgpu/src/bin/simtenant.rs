//! A tenant's workload on the command line.

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use gpuquota_simgpu::side;
use gpuquota_simgpu::tenant::TenantError;
use gpuquota_simgpu::tenant::run::{Options, Tenant};
use gpuquota_simgpu::tenant::step::Step;

/// Use a GPU as a tenant does: allocate, launch, fork, die. Works with the simulated GPU and with a real one.
///
/// Every step prints one line. Exit code 0: all went well; 2: a request was refused for want of memory;
/// 1: anything else failed.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// File name or path of libcuda.
    #[arg(long, default_value = "libcuda.so.1", global = true)]
    cuda: String,
    /// Which GPU.
    #[arg(long, default_value_t = 0, global = true)]
    device: u32,
    /// Directory of the device files, for the ways without libcuda [default: `$SIMGPU_DIR` or /dev]
    #[arg(long, global = true)]
    devices: Option<PathBuf>,
    /// Go without libcuda: speak to the driver's files directly.
    #[arg(long, global = true)]
    raw: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    #[command(flatten)]
    Step(Step),
    /// Run several steps in one process.
    Script {
        /// The steps, separated by semicolons.
        steps: String,
    },
    /// Read a step from each line of standard input, and answer each with a line.
    Interactive,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let devices = args.devices.unwrap_or_else(|| {
        std::env::var_os(side::DIR_VARIABLE).map_or_else(|| PathBuf::from("/dev"), PathBuf::from)
    });
    let mut tenant = Tenant::new(Options {
        cuda: args.cuda,
        device: args.device,
        devices,
        raw: args.raw,
    });
    let code = match args.command {
        Command::Step(step) => answer(tenant.run(&step)),
        Command::Script { steps } => match Step::parse_script(&steps) {
            Ok(steps) => script(&mut tenant, &steps),
            Err(error) => answer(Err(error)),
        },
        Command::Interactive => interactive(&mut tenant),
    };
    ExitCode::from(code)
}

/// Prints a step's line and returns its exit code.
fn answer(result: Result<String, TenantError>) -> u8 {
    let (line, code) = match result {
        Ok(line) => (line, 0),
        Err(error) => (error.line(), error.exit_code()),
    };
    let mut out = std::io::stdout();
    // Nobody may be listening.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    code
}

/// Want of memory is an answer and does not end a script; everything else does.
fn script(tenant: &mut Tenant, steps: &[Step]) -> u8 {
    let mut worst = 0;
    for step in steps {
        match answer(tenant.run(step)) {
            0 => {}
            2 => worst = 2,
            code => return code,
        }
    }
    worst
}

fn interactive(tenant: &mut Tenant) -> u8 {
    let mut worst = 0;
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        let result = Step::parse(line).and_then(|step| tenant.run(&step));
        let code = answer(result);
        if code != 0 {
            worst = code;
        }
    }
    worst
}
