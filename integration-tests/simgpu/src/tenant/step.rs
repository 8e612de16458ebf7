//! The steps that a workload consists of, and how they are written.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};

use super::TenantError;
use crate::bytes::parse_size;

/// Ways to allocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Via {
    /// `cuMemAlloc`.
    Malloc,
    /// `cuMemAllocAsync`.
    Async,
    /// `cuMemAllocFromPoolAsync` on the default pool.
    Pool,
    /// `cuMemCreate`, mapped and made accessible.
    Create,
    /// `cuMemAllocManaged`, touched by a kernel.
    Managed,
    /// `cuMemAllocPitch`.
    Pitch,
    /// `cuMemAllocHost`: pinned memory of the host.
    Host,
    /// Without libcuda: `RM_ALLOC` in the long layout.
    Nvos64,
    /// Without libcuda: `RM_ALLOC` in the short layout.
    Nvos21,
    /// Without libcuda: `RM_ALLOC` inside `IOCTL_XFER_CMD`.
    Xfer,
    /// Without libcuda: `RM_ALLOC` under a command with other type and direction bits.
    OddBits,
    /// Without libcuda: `VID_HEAP_CONTROL`, by size.
    Heap,
    /// Without libcuda: `VID_HEAP_CONTROL`, by size in a range.
    HeapRange,
    /// Without libcuda: `VID_HEAP_CONTROL`, height times pitch.
    HeapTiled,
    /// Without libcuda: legacy `RM_ALLOC_MEMORY` on the GPU's file. It gives a window on all memory of the card
    /// and takes none.
    Legacy,
    /// Without libcuda: pinned host memory by `RM_ALLOC`.
    System,
    /// Without libcuda: pinned host memory by the legacy `RM_ALLOC_MEMORY`.
    LegacyHost,
    /// Without libcuda: pinned host memory by `VID_HEAP_CONTROL`.
    HeapHost,
    /// Without libcuda: allocated, duplicated, and the first handle freed.
    Dup,
    /// Without libcuda: below the subdevice instead of the device.
    Subdevice,
    /// Without libcuda: with parameters that are not in memory when the call is made.
    Cold,
    /// Without libcuda: with the flag that says that parameters are serialised.
    Finn,
    /// Without libcuda: by the system call of a 32-bit program.
    Compat,
    /// Without libcuda: with a second thread that raises the size as soon as the call is made.
    Race,
    /// Without libcuda: under a handle that is in use, which the driver refuses, then freed and made again under it.
    Reuse,
}

impl Via {
    /// Whether it goes without libcuda.
    pub fn is_raw(self) -> bool {
        !matches!(
            self,
            Self::Malloc
                | Self::Async
                | Self::Pool
                | Self::Create
                | Self::Managed
                | Self::Pitch
                | Self::Host
        )
    }
}

/// Ways to launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LaunchVia {
    /// `cuLaunchKernel`.
    Kernel,
    /// `cuLaunchKernelEx`.
    Ex,
    /// `cuLaunchCooperativeKernel`.
    Cooperative,
    /// `cuGraphLaunch`.
    Graph,
}

/// Ways to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WaitVia {
    /// `cuStreamSynchronize`.
    Stream,
    /// `cuCtxSynchronize`.
    Context,
    /// `cuEventRecord` and `cuEventSynchronize`.
    Event,
    /// `cuStreamSynchronize_ptsz`, after a launch on the thread's own stream.
    PerThread,
    /// `cuStreamSynchronize` on another stream: not at all.
    Other,
}

/// One step.
#[derive(Clone, Debug, Subcommand)]
pub enum Step {
    /// Allocate memory.
    Alloc {
        /// How much, in all of one allocation.
        #[arg(value_parser = parse_size)]
        size: u64,
        /// How many such allocations.
        #[arg(long, default_value_t = 1)]
        count: u64,
        /// Split each into allocations of this size.
        #[arg(long, value_parser = parse_size)]
        chunk: Option<u64>,
        /// How.
        #[arg(long, value_enum)]
        via: Option<Via>,
        /// Keep it for so long.
        #[arg(long, value_parser = parse_duration)]
        hold: Option<Duration>,
        /// Keep it until standard input ends or has a line.
        #[arg(long)]
        hold_stdin: bool,
        /// Then free it.
        #[arg(long)]
        free: bool,
    },
    /// Allocate until there is no more.
    Fill {
        /// Size of each allocation.
        #[arg(long, default_value = "64MiB", value_parser = parse_size)]
        chunk: u64,
        /// How.
        #[arg(long, value_enum)]
        via: Option<Via>,
        /// Stop there.
        #[arg(long, value_parser = parse_size)]
        most: Option<u64>,
    },
    /// Free all that was allocated, or the newest.
    Free {
        /// Only so many, newest first.
        #[arg(long)]
        newest: Option<usize>,
    },
    /// Make a context and nothing else.
    Context,
    /// Print what the driver says is free.
    Info,
    /// Allocate and free again and again, without libcuda; print how long each takes.
    Measure {
        /// Size of the allocation.
        #[arg(long, default_value = "2MiB", value_parser = parse_size)]
        size: u64,
        /// How often.
        #[arg(long, default_value_t = 200)]
        rounds: usize,
    },
    /// Launch kernels at a rate.
    Launch {
        /// Launches a second, as `2000/s`, or `max`.
        #[arg(long, default_value = "max", value_parser = parse_rate)]
        rate: Rate,
        /// For so long.
        #[arg(long = "for", default_value = "1s", value_parser = parse_duration)]
        duration: Duration,
        /// Length of a kernel in microseconds.
        #[arg(long, default_value_t = 25)]
        kernel_us: u64,
        /// How.
        #[arg(long, value_enum, default_value = "kernel")]
        via: LaunchVia,
        /// Kernels of a graph.
        #[arg(long, default_value_t = 1)]
        nodes: u32,
    },
    /// Launch some kernels and wait for them, again and again; print how long that takes.
    Burst {
        /// Kernels between two waits.
        #[arg(long, default_value_t = 20)]
        kernels: u32,
        /// Length of a kernel in microseconds.
        #[arg(long, default_value_t = 25)]
        kernel_us: u64,
        /// For so long.
        #[arg(long = "for", default_value = "1s", value_parser = parse_duration)]
        duration: Duration,
    },
    /// Launch a kernel and wait for it, so often; the kernel is the same one for every length, and is kept for the next such
    /// step.
    Rounds {
        /// How often.
        rounds: u64,
        /// Length of the kernel in microseconds.
        #[arg(long, default_value_t = 1000)]
        kernel_us: u64,
        /// How to wait.
        #[arg(long, value_enum, default_value = "stream")]
        wait: WaitVia,
        /// Get the kernel anew, from a library as the CUDA runtime does.
        #[arg(long)]
        library: bool,
    },
    /// Set the time slice of an own channel group, without libcuda.
    Slice {
        /// Microseconds.
        us: u64,
    },
    /// Do nothing for so long.
    Hold {
        /// How long.
        #[arg(value_parser = parse_duration)]
        duration: Duration,
    },
    /// Start a child that keeps the open files and does nothing.
    Fork {
        /// The child ends by itself after so long.
        #[arg(long, default_value = "1h", value_parser = parse_duration)]
        hold: Duration,
    },
    /// Start a child that allocates in this process's client, without libcuda, and ends.
    ChildAlloc {
        /// How much.
        #[arg(value_parser = parse_size)]
        size: u64,
    },
    /// Free a handle that names nothing, without libcuda.
    FreeUnknown,
    /// Free one of two allocations by a call that a second thread turns to the other one, again and again, without
    /// libcuda; both have this size.
    RaceFree {
        /// How much each.
        #[arg(value_parser = parse_size)]
        size: u64,
    },
    /// Disable or enable channels, of whatever client, without libcuda.
    Channels {
        /// Handle of the client.
        #[arg(value_parser = parse_handle)]
        client: u32,
        /// Handles of the channels.
        #[arg(value_parser = parse_handle, required = true)]
        channels: Vec<u32>,
        /// Enable them.
        #[arg(long)]
        enable: bool,
    },
    /// Make a socket to which another process can send files.
    Listen {
        /// Where.
        at: PathBuf,
    },
    /// Take out what was sent there.
    Receive,
    /// Close what was received.
    CloseReceived,
    /// Send the driver's control files that this process has open to a socket.
    Pass {
        /// Where it is.
        to: PathBuf,
    },
    /// Close the driver's control files that this process has open.
    LetGo,
    /// Run another workload in a new process, and wait for it.
    Spawn {
        /// Its steps, separated by semicolons.
        script: String,
    },
    /// Allocate and free at random.
    Random {
        /// Where the random numbers begin; the same seed does the same.
        #[arg(long)]
        seed: u64,
        /// How many operations.
        #[arg(long, default_value_t = 100)]
        ops: u64,
        /// Largest allocation.
        #[arg(long, default_value = "512MiB", value_parser = parse_size)]
        largest: u64,
        /// Only by this way.
        #[arg(long, value_enum)]
        via: Option<Via>,
    },
    /// End by a signal, like a crash.
    Die {
        /// Which signal.
        #[arg(long, default_value_t = libc::SIGKILL)]
        signal: i32,
    },
}

/// A launch rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rate {
    /// As fast as it goes.
    Max,
    /// So many a second.
    PerSecond(f64),
}

/// A step on a line of its own.
#[derive(Parser)]
#[command(no_binary_name = true, disable_version_flag = true)]
struct Line {
    #[command(subcommand)]
    step: Step,
}

impl Step {
    /// Reads a step as a shell would: words, of which one may be in quotes.
    pub fn parse(line: &str) -> Result<Self, TenantError> {
        let line = Line::try_parse_from(words(line)).map_err(|error| {
            let text = error.render().to_string();
            TenantError::Usage(text.lines().next().unwrap_or_default().to_owned())
        })?;
        Ok(line.step)
    }

    /// Reads steps that semicolons separate; those in quotes belong to the step.
    pub fn parse_script(text: &str) -> Result<Vec<Self>, TenantError> {
        let mut steps = Vec::new();
        let mut quote = None;
        let mut start = 0;
        for (at, c) in text.char_indices() {
            match (c, quote) {
                (';', None) => {
                    steps.push(&text[start..at]);
                    start = at + 1;
                }
                ('"' | '\'', None) => quote = Some(c),
                (c, Some(open)) if c == open => quote = None,
                _ => {}
            }
        }
        steps.push(&text[start..]);
        steps
            .into_iter()
            .map(str::trim)
            .filter(|step| !step.is_empty())
            .map(Self::parse)
            .collect()
    }
}

/// A handle as the state shows it, or as programs print it.
fn parse_handle(text: &str) -> Result<u32, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("{text:?} is no handle: as 0x5c000001, or 1543503873"))
}

fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in line.chars() {
        match (c, quote) {
            (c, Some(open)) if c == open => quote = None,
            ('"' | '\'', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (c, None) if c.is_whitespace() => words.extend(word.take()),
            (c, _) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no duration: as 10s, 250ms, 500us, 2m, 1h");
    let split = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .ok_or_else(wrong)?;
    let number: f64 = text[..split].parse().map_err(|_| wrong())?;
    let unit = match &text[split..] {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(wrong()),
    };
    Duration::try_from_secs_f64(number * unit).map_err(|_| wrong())
}

fn parse_rate(text: &str) -> Result<Rate, String> {
    if text == "max" {
        return Ok(Rate::Max);
    }
    text.trim_end_matches("/s")
        .parse::<f64>()
        .ok()
        .filter(|rate| rate.is_finite() && *rate > 0.0)
        .map(Rate::PerSecond)
        .ok_or_else(|| format!("{text:?} is no rate: as 2000/s, or max"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts() {
        let steps =
            Step::parse_script("alloc 1GiB --via async; hold 1s; spawn 'alloc 2GiB; die'; free;")
                .unwrap();
        assert_eq!(steps.len(), 4);
        assert!(matches!(
            &steps[0],
            Step::Alloc {
                size: 0x4000_0000,
                via: Some(Via::Async),
                ..
            }
        ));
        assert!(matches!(&steps[2], Step::Spawn { script } if script == "alloc 2GiB; die"));
        assert!(matches!(
            Step::parse("channels 0xc1d00001 7 8").unwrap(),
            Step::Channels { client: 0xc1d0_0001, channels, enable: false } if channels == [7, 8]
        ));
        assert!(Step::parse_script("alloc").is_err());
        assert!(Step::parse("hold 5").is_err());
    }

    #[test]
    fn durations_and_rates() {
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        assert!(parse_duration("s").is_err());
        assert_eq!(parse_rate("2000/s"), Ok(Rate::PerSecond(2000.0)));
        assert_eq!(parse_rate("max"), Ok(Rate::Max));
        assert!(parse_rate("-1/s").is_err());
    }
}
