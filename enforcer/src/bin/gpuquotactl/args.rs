//! The command line as clap sees it.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueHint};
use clap_complete::Shell;
use gpuquota_enforcer::config::{Bus, DEFAULT_LISTENER_SOCKET};
use gpuquota_policy::GpuSelector;

use crate::top::Sort;

const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    failed
  2    wrong usage
  69   the daemon is not there
  77   not permitted
  78   bad configuration
`run` exits as the command does, with 128 + N after signal N, 126 or 127 if it cannot be executed.";

/// Looks at and changes the GPU quotas of this host.
#[derive(Debug, Parser)]
#[command(name = "gpuquotactl", version, after_help = EXIT_CODES, max_term_width = 100)]
pub struct Cli {
    /// Where the daemon is: system, session, peer:PATH or a D-Bus address
    #[arg(
        long,
        global = true,
        value_name = "BUS",
        env = "GPUQUOTA_BUS",
        default_value = "system"
    )]
    pub bus: Bus,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    #[command(flatten)]
    Verb(Verb),
    /// Run a command inside a tenant
    #[command(after_help = "\
Example:
  gpuquotactl run --tenant vision --gpu 0 -- python3 train.py

The command and all it starts belong to the tenant. An allocation over the tenant's budget is answered with
\"out of memory\"; while the daemon is away, allocations wait for it, and are refused if it stays away.")]
    Run(RunArgs),
}

/// The verbs that end by themselves.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// List the tenants
    List(Json),
    /// Show limits, usage and processes
    Status {
        /// Only this tenant, with its processes
        tenant: Option<String>,
        /// Show the tenant that governs this process instead
        #[arg(long, value_name = "PID", conflicts_with = "tenant")]
        pid: Option<u32>,
        #[command(flatten)]
        json: Json,
    },
    /// Show tenants and what they use, live; ? explains the keys
    Top(TopArgs),
    /// Show memory of tenants over time, of the last day at most
    History {
        /// Only this tenant
        tenant: Option<String>,
        /// How far back, such as 10m or 2h; the farther, the coarser the steps
        #[arg(long, value_name = "TIME", default_value = "10m", value_parser = span)]
        since: Duration,
        #[command(flatten)]
        json: Json,
    },
    /// Draw memory of tenants over time as a heat map
    Report {
        /// How far back, such as 10m or 2h, at most a day
        #[arg(long, value_name = "TIME", default_value = "2h", value_parser = span)]
        since: Duration,
        /// Where to: a name that ends in .svg or .html; standard output (SVG) without it
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        output: Option<PathBuf>,
    },
    /// Record utilisation, memory, power and tenants at steps of milliseconds into a file
    #[command(after_help = "\
Example:
  gpuquotactl record --for 30s --interval 5ms --output steps.csv --plot steps.svg

NVML is asked by this command itself, so that it costs something only while it runs. A pace that NVML cannot keep is
refused, and the one that was kept is told at the end.")]
    Record(RecordArgs),
    /// Change properties of a tenant: all of them, or none if one is refused
    #[command(after_help = "\
Examples:
  gpuquotactl set-property vision memory.max=20GiB memory.high=18GiB
  gpuquotactl set-property vision memory.max=70GiB --gpu 1 --runtime
  gpuquotactl set-property vision memory.high=        remove the property

The change takes effect at once and is kept in a drop-in; files of the administrator are never written.")]
    SetProperty {
        /// Name of the tenant
        tenant: String,
        /// Properties as in the policy file; an empty value removes one
        #[arg(required = true, value_name = "KEY=VALUE", value_parser = property)]
        properties: Vec<(String, String)>,
        /// One GPU, by index or UUID, instead of all
        #[arg(long)]
        gpu: Option<String>,
        /// Until the next boot only
        #[arg(long)]
        runtime: bool,
    },
    /// Drop what set-property changed
    ResetProperty {
        /// Name of the tenant
        tenant: String,
        /// Only these properties
        #[arg(value_name = "KEY")]
        properties: Vec<String>,
    },
    /// Stop a tenant's work on the GPU; it goes on where it was when the tenant is thawed
    Freeze(Hold),
    /// Let a frozen tenant go on
    Thaw(Hold),
    /// Make the daemon read the policy files again
    Reload(Json),
    /// Show events as they happen, until interrupted
    Monitor {
        /// Only events of this tenant
        tenant: Option<String>,
        #[command(flatten)]
        json: Json,
    },
    /// Look at policy files; works without the daemon
    #[command(subcommand)]
    Policy(PolicyCommand),
    /// Find what a tenant or process allocates on GPUs and does not free, by call site
    #[command(after_help = "\
Examples:
  gpuquotactl leaks vision --for 10min
  gpuquotactl leaks 4711 --for 1min --pprof heap.pb --folded heap.txt
  gpuquotactl leaks vision --so-far      while another one is looking

Probes go into the processes and are gone when the time is over. Memory that was obtained before is not seen.")]
    Leaks(LeaksArgs),
    /// Show which kernels a tenant or process launches, how often, and how long it waits for them
    #[command(after_help = "\
Examples:
  gpuquotactl profile vision --for 30s
  gpuquotactl profile 4711 --for 1min --json
  gpuquotactl profile vision --so-far    while another one is looking, or insight.profile = true

Probes go into the processes and are gone when the time is over. They are in them for as much of the time as
insight.budget allows. Kernels whose names were given out before are shown by their handles.")]
    Profile(ProfileArgs),
    /// Tell what the threads of a tenant or process do while its GPU is idle
    #[command(after_help = "\
Examples:
  gpuquotactl idle vision --for 30s
  gpuquotactl idle 4711 --for 10s --folded idle.txt
  gpuquotactl idle vision --so-far      while another one is looking

A program is on the context switches of the host as long as it looks, and gone when the time is over. NVML tells how a GPU
was used some time later, so the answer comes up to 5 s after the end.")]
    Idle(IdleArgs),
    /// Tell what this host offers, what is in use, and why the rest is not
    Doctor(Json),
    /// Make tenants of the pods of a Kubernetes node, by their annotations
    #[command(after_help = "\
A pod with annotations such as
  gpuquota.org/memory.max: 20GiB
  gpuquota.org/class: burstable
becomes a tenant named NAMESPACE.NAME whose cgroup is the pod's. The tenants are kept in a policy file of their own,
which is written anew when they change. A pod whose annotations are wrong is reported and passed over.")]
    KubernetesSync(KubernetesArgs),
    /// Show the versions of this program and of the daemon
    Version(Json),
    /// Print a completion script for a shell
    Completions {
        /// Which shell
        shell: Shell,
    },
    /// Write the manual pages into a directory
    Man {
        /// Where; must exist
        #[arg(value_hint = ValueHint::DirPath)]
        directory: PathBuf,
    },
    /// Print the state of the daemon for a bug report
    #[command(hide = true)]
    DumpState,
}

/// Whom to freeze or thaw.
#[derive(Debug, Args)]
pub struct Hold {
    /// Name of the tenant
    pub tenant: String,
    /// One GPU, by index or UUID, instead of all
    #[arg(long)]
    pub gpu: Option<String>,
}

/// For verbs that only read.
#[derive(Clone, Copy, Debug, Args)]
pub struct Json {
    /// Print JSON: exact bytes, no colours
    #[arg(long)]
    pub json: bool,
}

/// Verbs about policy files.
#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Report every problem of the policy files
    Check {
        #[command(flatten)]
        files: PolicyFiles,
        #[command(flatten)]
        json: Json,
    },
    /// Print the merged policy
    Show {
        #[command(flatten)]
        files: PolicyFiles,
        #[command(flatten)]
        json: Json,
    },
    /// Tell what holds for a tenant and which file says so
    Explain {
        /// Name of the tenant
        tenant: String,
        /// What holds on this GPU, by index or UUID
        #[arg(long, value_name = "GPU", value_parser = selector)]
        gpu: Option<GpuSelector>,
        #[command(flatten)]
        files: PolicyFiles,
        #[command(flatten)]
        json: Json,
    },
}

/// Whom to look at, and for how long.
#[derive(Debug, Args)]
pub struct LookArgs {
    /// A tenant, or a process by its number; without one, those that are looked at are listed
    #[arg(value_name = "TENANT|PID")]
    pub target: Option<String>,
    /// How long to look, such as 30s or 10min
    #[arg(long = "for", value_name = "DURATION", default_value = "30s", value_parser = duration)]
    pub duration: Duration,
    /// Show what a look that goes on has found so far
    #[arg(long, requires = "target", conflicts_with = "stop")]
    pub so_far: bool,
    /// End a look and show what it has found
    #[arg(long, requires = "target")]
    pub stop: bool,
}

/// Whose leaks, and for how long.
#[derive(Debug, Args)]
pub struct LeaksArgs {
    #[command(flatten)]
    pub look: LookArgs,
    /// Write a profile for pprof
    #[arg(long, value_name = "FILE", requires = "target", value_hint = ValueHint::FilePath)]
    pub pprof: Option<PathBuf>,
    /// Write folded stacks for flame graphs
    #[arg(long, value_name = "FILE", requires = "target", value_hint = ValueHint::FilePath)]
    pub folded: Option<PathBuf>,
    /// Print JSON: exact bytes, no colours
    #[arg(long)]
    pub json: bool,
}

/// Whose launches, and for how long.
#[derive(Debug, Args)]
pub struct ProfileArgs {
    #[command(flatten)]
    pub look: LookArgs,
    /// Print JSON: all kernels, histograms, no colours
    #[arg(long)]
    pub json: bool,
}

/// Whose threads, and for how long.
#[derive(Debug, Args)]
pub struct IdleArgs {
    #[command(flatten)]
    pub look: LookArgs,
    /// Write folded stacks for flame graphs
    #[arg(long, value_name = "FILE", requires = "target", value_hint = ValueHint::FilePath)]
    pub folded: Option<PathBuf>,
    /// Print JSON: exact numbers, no colours
    #[arg(long)]
    pub json: bool,
}

/// How `top` looks.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Print one frame and end
    #[arg(long)]
    pub once: bool,
    /// Seconds between two looks, from 0.1
    #[arg(long, short = 'd', value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub interval: Duration,
    /// By what tenants are ordered
    #[arg(long, value_enum, default_value_t = Sort::Used)]
    pub sort: Sort,
    /// Only tenants with this text in their name, cgroup or class
    #[arg(long, value_name = "TEXT")]
    pub filter: Option<String>,
    /// Width of the frame of --once in columns
    #[arg(long, requires = "once", value_name = "COLUMNS")]
    pub width: Option<u16>,
}

/// What is recorded, and where to.
#[derive(Debug, Args)]
pub struct RecordArgs {
    /// How long, from 10ms to 24h
    #[arg(long = "for", value_name = "TIME", default_value = "30s", value_parser = recorded)]
    pub duration: Duration,
    /// Time between two looks, from 1ms
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = pace)]
    pub interval: Duration,
    /// One GPU, by index, instead of all
    #[arg(long)]
    pub gpu: Option<u32>,
    /// Where to
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: PathBuf,
    /// How it is written
    #[arg(long, value_enum, default_value_t = RecordFormat::Csv)]
    pub format: RecordFormat,
    /// Draw it into this file too (SVG)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub plot: Option<PathBuf>,
    /// The NVML library, where the loader does not find it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub nvml_library: Option<PathBuf>,
}

/// How a recording is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RecordFormat {
    /// Comma-separated values
    Csv,
    /// Apache Parquet, if this program was built with it
    Parquet,
}

/// How pods are found, and where their tenants go.
#[derive(Debug, Args)]
pub struct KubernetesArgs {
    /// Only pods of this node
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub node: Option<String>,
    /// Look once and end
    #[arg(long)]
    pub once: bool,
    /// Seconds between two looks, from 0.1
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = interval)]
    pub interval: Duration,
    /// How the kubelet names cgroups
    #[arg(long, value_enum, default_value_t = Driver::Auto)]
    pub cgroup_driver: Driver,
    /// The kubelet's own setting cgroupRoot
    #[arg(long, value_name = "PATH", default_value = "/")]
    pub cgroup_root: String,
    /// The program that asks the API server
    #[arg(long, value_name = "PROGRAM", default_value = "kubectl", value_hint = ValueHint::ExecutablePath)]
    pub kubectl: PathBuf,
    /// The policy file to write, instead of 80-kubernetes.toml in the daemon's directory for this boot
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub file: Option<PathBuf>,
    /// Settings of the daemon, which name the directories
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
}

/// How the kubelet names cgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Driver {
    /// As what is there shows
    Auto,
    /// Slices of systemd
    Systemd,
    /// Plain folders
    Cgroupfs,
}

/// Which policy files.
#[derive(Debug, Args)]
pub struct PolicyFiles {
    /// Files or directories, read in this order (the later wins), instead of those of the daemon
    #[arg(value_name = "FILE|DIR", value_hint = ValueHint::AnyPath)]
    pub paths: Vec<PathBuf>,
    /// Settings of the daemon, which name the directories
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
}

/// How to run a command.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The tenant that the command belongs to
    #[arg(long)]
    pub tenant: String,
    /// A GPU that the command may see, by index or UUID; may be given several times
    #[arg(long = "gpu", value_name = "GPU", value_parser = gpu)]
    pub gpus: Vec<String>,
    /// User that the command runs as
    #[arg(long)]
    pub uid: Option<u32>,
    /// Group that the command runs as
    #[arg(long)]
    pub gid: Option<u32>,
    /// Socket where the daemon takes over the command's calls
    #[arg(
        long,
        value_name = "PATH",
        value_hint = ValueHint::FilePath,
        env = "GPUQUOTA_LISTENER",
        default_value = DEFAULT_LISTENER_SOCKET
    )]
    pub socket: PathBuf,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND", value_hint = ValueHint::CommandWithArguments)]
    pub command: Vec<OsString>,
}

fn property(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.trim().is_empty() => {
            Ok((key.trim().to_owned(), value.trim().to_owned()))
        }
        _ => Err("write KEY=VALUE, such as memory.max=20GiB".into()),
    }
}

/// A time as policies have it, from a second to a day.
fn span(text: &str) -> Result<Duration, String> {
    within(text, Duration::from_secs(1), Duration::from_hours(24))
}

fn recorded(text: &str) -> Result<Duration, String> {
    within(text, Duration::from_millis(10), Duration::from_hours(24))
}

fn pace(text: &str) -> Result<Duration, String> {
    within(text, Duration::from_millis(1), Duration::from_hours(1))
}

fn within(text: &str, least: Duration, most: Duration) -> Result<Duration, String> {
    let span = gpuquota_policy::parse_duration(text).map_err(|error| error.to_string())?;
    if (least..=most).contains(&span) {
        return Ok(span);
    }
    Err(format!(
        "allowed is {} to {}",
        gpuquota_policy::format_duration(least),
        gpuquota_policy::format_duration(most)
    ))
}

fn interval(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("a number of seconds from 0.1 to 3600".into()),
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || "a number and a unit: 30s, 10min, 2h".to_owned();
    let at = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let number: u64 = text[..at].parse().map_err(|_| wrong())?;
    let unit = match &text[at..] {
        "s" => 1,
        "min" | "m" => 60,
        "h" => 3600,
        _ => return Err(wrong()),
    };
    number
        .checked_mul(unit)
        .map(Duration::from_secs)
        .ok_or_else(wrong)
}

fn selector(text: &str) -> Result<GpuSelector, String> {
    match GpuSelector::parse(text) {
        Ok(GpuSelector::Any) => Err("name one GPU, by index or UUID".into()),
        other => other.map_err(|error| error.to_string()),
    }
}

/// The values end up in a comma-separated list.
fn gpu(text: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '/';
    if text.is_empty() || !text.chars().all(fits) {
        return Err("a GPU is an index such as 0, or a UUID such as GPU-8b3f1c2e-…".into());
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_verb_is_in_the_reference() {
        let reference = include_str!("../../../../docs/cli.md");
        for verb in Cli::command().get_subcommands() {
            let name = verb.get_name();
            assert!(
                verb.is_hide_set()
                    || reference.contains(&format!("`{name}"))
                    || reference.contains(&format!("gpuquotactl {name} ")),
                "{name} is not in docs/cli.md"
            );
        }
    }

    #[test]
    fn every_option_of_a_verb_is_in_the_reference() {
        let reference = include_str!("../../../../docs/cli.md");
        let words: std::collections::BTreeSet<_> = reference
            .split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'))
            .collect();
        let mut options = 0;
        for verb in Cli::command().get_subcommands() {
            let nested = verb.get_subcommands();
            let arguments = verb
                .get_arguments()
                .chain(nested.flat_map(clap::Command::get_arguments));
            for long in arguments.filter_map(|argument| argument.get_long()) {
                let option = format!("--{long}");
                assert!(
                    words.contains(option.as_str()),
                    "{option} of {} is not in docs/cli.md",
                    verb.get_name()
                );
                options += 1;
            }
        }
        assert!(options > 30, "{options}");
    }

    #[test]
    fn properties_need_a_key_and_may_have_an_empty_value() {
        assert_eq!(
            property("memory.max = 20GiB"),
            Ok(("memory.max".into(), "20GiB".into()))
        );
        assert_eq!(
            property("memory.high="),
            Ok(("memory.high".into(), String::new()))
        );
        assert!(property("memory.max").is_err());
        assert!(property("=1").is_err());
    }

    #[test]
    fn a_list_does_not_pass_as_one_gpu() {
        assert!(gpu("0,1").is_err());
        assert!(gpu("").is_err());
        assert!(gpu("GPU-8b3f1c2e-0000-4000-8000-000000000001").is_ok());
    }

    #[test]
    fn what_follows_the_command_belongs_to_it() {
        let cli = Cli::try_parse_from([
            "gpuquotactl",
            "run",
            "--tenant",
            "t",
            "sh",
            "-c",
            "x",
            "--bus",
            "y",
        ])
        .expect("valid");
        let Command::Run(run) = cli.command else {
            panic!("run expected")
        };
        assert_eq!(run.command, ["sh", "-c", "x", "--bus", "y"]);
    }
}
