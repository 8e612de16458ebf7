//! Runs steps.

use std::fmt::Write as _;
use std::io::BufRead;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::TenantError;
use super::cuda::{Cuda, Kernel};
use super::passing::{self, Passing};
use super::raw::Raw;
use super::step::{LaunchVia, Rate, Step, Via, WaitVia};

/// What a workload uses.
#[derive(Clone, Debug)]
pub struct Options {
    /// File name of libcuda.
    pub cuda: String,
    /// Which GPU.
    pub device: u32,
    /// Directory of the device files, for the ways without libcuda.
    pub devices: PathBuf,
    /// Whether steps go without libcuda unless they say otherwise.
    pub raw: bool,
}

/// Something that was allocated.
struct Held {
    via: Via,
    size: u64,
    /// Address, or handle for the ways without libcuda.
    place: u64,
    /// Handle of `cuMemCreate`.
    handle: u64,
}

/// A process that runs steps one after the other.
pub struct Tenant {
    options: Options,
    cuda: Option<Cuda>,
    raw: Option<Raw>,
    held: Vec<Held>,
    passing: Passing,
    /// Of the rounds before.
    kept_kernel: Option<Kernel>,
}

impl Tenant {
    /// A process that has not touched a GPU yet.
    pub fn new(options: Options) -> Self {
        Self {
            options,
            cuda: None,
            raw: None,
            held: Vec::new(),
            passing: Passing::default(),
            kept_kernel: None,
        }
    }

    /// Runs a step; returns the one line that tells what came of it.
    pub fn run(&mut self, step: &Step) -> Result<String, TenantError> {
        match step {
            Step::Alloc {
                size,
                count,
                chunk,
                via,
                hold,
                hold_stdin,
                free,
            } => {
                let line = self.alloc_all(self.via(*via), *size, *count, *chunk)?;
                if let Some(hold) = hold {
                    std::thread::sleep(*hold);
                }
                if *hold_stdin {
                    // The end of the input and a line mean the same.
                    let _ = std::io::stdin().lock().read_line(&mut String::new());
                }
                if *free {
                    self.free_newest(usize::MAX)?;
                }
                Ok(line)
            }
            Step::Fill { chunk, via, most } => self.fill(self.via(*via), *chunk, *most),
            Step::Free { newest } => {
                let bytes = self.free_newest(newest.unwrap_or(usize::MAX))?;
                Ok(format!("freed {bytes}"))
            }
            Step::Context => {
                self.cuda()?;
                Ok("context".into())
            }
            Step::Info => {
                let (free, total) = self.cuda()?.memory_info()?;
                Ok(format!("free {free} total {total}"))
            }
            Step::Measure { size, rounds } => self.measure(*size, *rounds),
            Step::Launch {
                rate,
                duration,
                kernel_us,
                via,
                nodes,
            } => self.launch(*rate, *duration, *kernel_us, *via, *nodes),
            Step::Burst {
                kernels,
                kernel_us,
                duration,
            } => self.burst(*kernels, *kernel_us, *duration),
            Step::Rounds {
                rounds,
                kernel_us,
                wait,
                library,
            } => self.rounds(*rounds, *kernel_us, *wait, *library),
            Step::Slice { us } => {
                self.raw()?.set_slice(*us)?;
                Ok(format!("slice {us}"))
            }
            Step::Hold { duration } => {
                std::thread::sleep(*duration);
                Ok("held".into())
            }
            Step::Fork { hold } => fork(*hold),
            Step::ChildAlloc { size } => self.child_alloc(*size),
            Step::FreeUnknown => {
                self.raw()?.free(UNKNOWN)?;
                Ok("freed nothing".into())
            }
            Step::RaceFree { size } => {
                let (lost, tries) = self.raw()?.race_free(*size)?;
                Ok(format!("the other one was freed {lost} times of {tries}"))
            }
            Step::Channels {
                client,
                channels,
                enable,
            } => {
                self.raw()?.set_disabled(*client, channels, !enable)?;
                Ok(format!("changed {}", channels.len()))
            }
            Step::Listen { at } => self.passing.listen(at),
            Step::Receive => self.passing.receive(),
            Step::CloseReceived => Ok(self.passing.close_received()),
            Step::Pass { to } => passing::pass(to),
            Step::LetGo => passing::let_go(),
            Step::Spawn { script } => self.spawn(script),
            Step::Random {
                seed,
                ops,
                largest,
                via,
            } => self.random(*seed, *ops, *largest, *via),
            Step::Die { signal } => {
                // SAFETY: a signal to oneself; with SIGKILL the call does not return.
                unsafe { libc::kill(libc::getpid(), *signal) };
                Err(TenantError::Usage(format!(
                    "signal {signal} did not end the process"
                )))
            }
        }
    }

    fn via(&self, asked: Option<Via>) -> Via {
        asked.unwrap_or(if self.options.raw {
            Via::Nvos64
        } else {
            Via::Malloc
        })
    }

    fn cuda(&mut self) -> Result<&Cuda, TenantError> {
        let cuda = match self.cuda.take() {
            Some(cuda) => cuda,
            None => Cuda::open(
                &self.options.cuda,
                i32::try_from(self.options.device).unwrap_or(i32::MAX),
            )?,
        };
        Ok(self.cuda.insert(cuda))
    }

    fn raw(&mut self) -> Result<&mut Raw, TenantError> {
        let raw = match self.raw.take() {
            Some(raw) => raw,
            None => Raw::open(&self.options.devices, self.options.device)?,
        };
        Ok(self.raw.insert(raw))
    }

    fn alloc_all(
        &mut self,
        via: Via,
        size: u64,
        count: u64,
        chunk: Option<u64>,
    ) -> Result<String, TenantError> {
        let mut got = 0;
        for _ in 0..count {
            let mut rest = size;
            while rest > 0 {
                let part = rest.min(chunk.unwrap_or(rest)).max(1);
                self.alloc(via, part)
                    .map_err(|error| with_sizes(error, part, got))?;
                got += part;
                rest -= part;
            }
        }
        Ok(format!("allocated {got}"))
    }

    fn fill(&mut self, via: Via, chunk: u64, most: Option<u64>) -> Result<String, TenantError> {
        let mut got = 0;
        loop {
            let part = most.map_or(chunk, |most| chunk.min(most - got));
            if part == 0 {
                break;
            }
            match self.alloc(via, part) {
                Ok(()) => got += part,
                Err(TenantError::OutOfMemory { .. }) => break,
                // As a security hook says it.
                Err(TenantError::Ioctl { source, .. })
                    if source.raw_os_error() == Some(libc::ENOMEM) =>
                {
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(format!("filled {got}"))
    }

    fn alloc(&mut self, via: Via, size: u64) -> Result<(), TenantError> {
        let mut handle = 0;
        let place = if via.is_raw() {
            self.raw()?.alloc(via, size)?.into()
        } else {
            let cuda = self.cuda()?;
            match via {
                Via::Async => cuda.alloc_async(size)?,
                Via::Pool => cuda.alloc_from_pool(size)?,
                Via::Create => {
                    let (address, memory) = cuda.create(size)?;
                    handle = memory;
                    address
                }
                Via::Managed => {
                    let address = cuda.alloc_managed(size)?;
                    let kernel = cuda.kernel(TOUCH, "touch")?;
                    cuda.launcher()?.launch(kernel, &mut [address, size])?;
                    cuda.synchronize()?;
                    address
                }
                Via::Pitch => cuda.alloc_pitch(size)?,
                Via::Host => cuda.alloc_host(size)?,
                _ => cuda.alloc(size)?,
            }
        };
        self.held.push(Held {
            via,
            size,
            place,
            handle,
        });
        Ok(())
    }

    fn free_newest(&mut self, count: usize) -> Result<u64, TenantError> {
        let mut bytes = 0;
        for _ in 0..count {
            let Some(held) = self.held.pop() else {
                break;
            };
            self.free(&held)?;
            bytes += held.size;
        }
        Ok(bytes)
    }

    fn free(&mut self, held: &Held) -> Result<(), TenantError> {
        if held.via.is_raw() {
            let handle = u32::try_from(held.place).unwrap_or_default();
            return self.raw()?.free(handle);
        }
        let cuda = self.cuda()?;
        match held.via {
            Via::Async | Via::Pool => cuda.free_async(held.place),
            Via::Create => cuda.destroy(held.place, held.handle, held.size),
            Via::Host => cuda.free_host(held.place),
            _ => cuda.free(held.place),
        }
    }

    fn launch(
        &mut self,
        rate: Rate,
        duration: Duration,
        kernel_us: u64,
        via: LaunchVia,
        nodes: u32,
    ) -> Result<String, TenantError> {
        let cuda = self.cuda()?;
        let name = format!("spin_{kernel_us}us");
        let kernel = cuda.kernel(&spin(&name, kernel_us), &name)?;
        let launcher = cuda.launcher()?;
        let graph = match via {
            LaunchVia::Graph => Some(cuda.graph(kernel, nodes)?),
            _ => None,
        };
        let begun = monotonic();
        let start = Instant::now();
        let mut issued = 0u64;
        while start.elapsed() < duration {
            if let Rate::PerSecond(rate) = rate {
                #[allow(clippy::cast_precision_loss, reason = "2^53 launches do not happen")]
                let due = start + Duration::from_secs_f64(issued as f64 / rate);
                let early = due.saturating_duration_since(Instant::now());
                // A sleep takes at least some 60 µs: shorter waits are made up by the next launches.
                if early > Duration::from_micros(100) {
                    std::thread::sleep(early.min(Duration::from_millis(50)));
                    continue;
                }
            }
            match (via, graph) {
                (LaunchVia::Kernel, _) => launcher.launch(kernel, &mut [])?,
                (LaunchVia::Ex, _) => cuda.launch_ex(kernel)?,
                (LaunchVia::Cooperative, _) => cuda.launch_cooperative(kernel)?,
                (LaunchVia::Graph, Some(graph)) => cuda.launch_graph(graph)?,
                (LaunchVia::Graph, None) => {}
            }
            issued += 1;
        }
        let took = start.elapsed();
        cuda.synchronize()?;
        #[allow(clippy::cast_precision_loss, reason = "2^53 launches do not happen")]
        let per_second = issued as f64 / took.as_secs_f64();
        Ok(format!(
            "launched {issued} in {:.3} s, {per_second:.0}/s, done after {:.3} s, begun at {:.3} s",
            took.as_secs_f64(),
            start.elapsed().as_secs_f64(),
            begun.as_secs_f64()
        ))
    }

    fn burst(
        &mut self,
        kernels: u32,
        kernel_us: u64,
        duration: Duration,
    ) -> Result<String, TenantError> {
        let cuda = self.cuda()?;
        let name = format!("spin_{kernel_us}us");
        let kernel = cuda.kernel(&spin(&name, kernel_us), &name)?;
        let launcher = cuda.launcher()?;
        let start = Instant::now();
        let mut times = Vec::new();
        while start.elapsed() < duration || times.is_empty() {
            let begin = Instant::now();
            for _ in 0..kernels {
                launcher.launch(kernel, &mut [])?;
            }
            cuda.synchronize()?;
            times.push(begin.elapsed());
        }
        times.sort_unstable();
        let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e3;
        Ok(format!(
            "bursts {} p50 {:.3} ms p99 {:.3} ms",
            times.len(),
            at(50),
            at(99)
        ))
    }

    fn rounds(
        &mut self,
        rounds: u64,
        kernel_us: u64,
        wait: WaitVia,
        library: bool,
    ) -> Result<String, TenantError> {
        let kept = self.kept_kernel.filter(|_| !library);
        let cuda = self.cuda()?;
        let kernel = match kept {
            Some(kernel) => kernel,
            None if library => cuda.library_kernel(SPIN_FOR, "spin_for")?,
            None => cuda.kernel(SPIN_FOR, "spin_for")?,
        };
        let launcher = cuda.launcher()?;
        let event = cuda.event()?;
        let mut length = [kernel_us.saturating_mul(1000)];
        for _ in 0..rounds {
            match wait {
                WaitVia::PerThread => cuda.launch_per_thread(kernel, &mut length[0])?,
                _ => launcher.launch(kernel, &mut length)?,
            }
            match wait {
                WaitVia::PerThread => cuda.synchronize_per_thread()?,
                WaitVia::Other => cuda.synchronize_default()?,
                WaitVia::Stream => cuda.synchronize()?,
                WaitVia::Context => cuda.synchronize_context()?,
                WaitVia::Event => {
                    cuda.record(event)?;
                    cuda.synchronize_event(event)?;
                }
            }
        }
        self.kept_kernel = Some(kernel);
        Ok(format!("rounds {rounds}"))
    }

    fn measure(&mut self, size: u64, rounds: usize) -> Result<String, TenantError> {
        let raw = self.raw()?;
        let (mut allocs, mut frees) = (Vec::new(), Vec::new());
        for _ in 0..rounds.max(1) {
            let start = Instant::now();
            let handle = raw.alloc(Via::Nvos64, size)?;
            let allocated = Instant::now();
            raw.free(handle)?;
            allocs.push(allocated - start);
            frees.push(allocated.elapsed());
        }
        // The lower decile: what else the machine does only ever adds to it.
        let typical = |times: &mut Vec<Duration>| {
            times.sort_unstable();
            times[times.len() / 10].as_nanos()
        };
        Ok(format!(
            "measured alloc {} ns free {} ns",
            typical(&mut allocs),
            typical(&mut frees)
        ))
    }

    fn child_alloc(&mut self, size: u64) -> Result<String, TenantError> {
        let raw = self.raw()?;
        // SAFETY: without libcuda this process has no other thread; the child makes a system call and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = i32::from(raw.alloc(Via::Nvos64, size).is_err());
            // SAFETY: ends the child without running anything of the parent's.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: our own child, or -1, for which the call fails.
        if child < 0 || unsafe { libc::waitpid(child, &raw mut status, 0) } < 0 {
            return Err(TenantError::System {
                what: "no child could be run",
                source: std::io::Error::last_os_error(),
            });
        }
        Ok(format!("child {child} ended with {status}"))
    }

    fn spawn(&self, script: &str) -> Result<String, TenantError> {
        let error = |source| TenantError::System {
            what: "cannot start another process",
            source,
        };
        let mut command = std::process::Command::new(std::env::current_exe().map_err(error)?);
        command
            .args(["--cuda", &self.options.cuda, "--device"])
            .arg(self.options.device.to_string())
            .arg("--devices")
            .arg(&self.options.devices);
        if self.options.raw {
            command.arg("--raw");
        }
        let output = command.args(["script", script]).output().map_err(error)?;
        let text = String::from_utf8_lossy(&output.stdout);
        let mut line = format!("spawned {}", output.status);
        for answer in text.lines() {
            // Writing to a string does not fail.
            let _ = write!(line, "; {answer}");
        }
        Ok(line)
    }

    fn random(
        &mut self,
        seed: u64,
        ops: u64,
        largest: u64,
        via: Option<Via>,
    ) -> Result<String, TenantError> {
        const WAYS: [Via; 4] = [Via::Malloc, Via::Async, Via::Create, Via::Pitch];
        let mut random = Random(seed);
        let (mut allocated, mut refused, mut freed) = (0u64, 0u64, 0u64);
        for _ in 0..ops {
            if !self.held.is_empty() && random.below(5) < 2 {
                let index = usize::try_from(random.below(self.held.len() as u64)).unwrap_or(0);
                let held = self.held.swap_remove(index);
                self.free(&held)?;
                freed += 1;
                continue;
            }
            let way = via.unwrap_or(WAYS[usize::try_from(random.below(4)).unwrap_or(0)]);
            // Sizes of every order, from a few bytes to the largest.
            let bits = random.below(u64::from(largest.max(2).ilog2()) + 1);
            let size = (random.next() & ((2 << bits) - 1)).clamp(1, largest);
            match self.alloc(way, size) {
                Ok(()) => allocated += 1,
                Err(TenantError::OutOfMemory { .. }) => refused += 1,
                Err(error) => return Err(error),
            }
        }
        Ok(format!(
            "random seed {seed}: allocated {allocated} refused {refused} freed {freed}"
        ))
    }
}

/// The clock that all processes have in common.
fn monotonic() -> Duration {
    nix::time::ClockId::CLOCK_MONOTONIC
        .now()
        .map(Duration::from)
        .unwrap_or_default()
}

fn with_sizes(error: TenantError, asked: u64, got: u64) -> TenantError {
    match error {
        TenantError::OutOfMemory { code, .. } => TenantError::OutOfMemory { code, asked, got },
        other => other,
    }
}

fn fork(hold: Duration) -> Result<String, TenantError> {
    // SAFETY: the child only sleeps and ends, both of which are allowed after fork.
    match unsafe { libc::fork() } {
        -1 => Err(TenantError::System {
            what: "cannot fork",
            source: std::io::Error::last_os_error(),
        }),
        0 => {
            std::thread::sleep(hold);
            // SAFETY: ends the child without running anything of the parent's.
            unsafe { libc::_exit(0) }
        }
        child => Ok(format!("forked {child}")),
    }
}

/// A kernel that runs for a time, for the model (by its name) and for a real GPU (by its text).
fn spin(name: &str, us: u64) -> String {
    let ns = us.saturating_mul(1000);
    format!(
        ".version 7.0
.target sm_70
.address_size 64
.visible .entry {name}()
{{
    .reg .u64 %now, %start, %since;
    .reg .pred %more;
    mov.u64 %start, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %since, %now, %start;
    setp.lt.u64 %more, %since, {ns};
    @%more bra again;
    ret;
}}
"
    )
}

/// A kernel that runs for as many nanoseconds as its argument says.
const SPIN_FOR: &str = ".version 7.0
.target sm_70
.address_size 64
.visible .entry spin_for(.param .u64 length)
{
    .reg .u64 %now, %start, %since, %length;
    .reg .pred %more;
    ld.param.u64 %length, [length];
    mov.u64 %start, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %since, %now, %start;
    setp.lt.u64 %more, %since, %length;
    @%more bra again;
    ret;
}
";

/// A handle under which nothing is ever made.
const UNKNOWN: u32 = 0x5cff_fff0;

/// A kernel that writes a byte into every 4 KiB of a range.
const TOUCH: &str = ".version 7.0
.target sm_70
.address_size 64
.visible .entry touch(.param .u64 base, .param .u64 length)
{
    .reg .u64 %at, %left;
    .reg .u32 %one;
    .reg .pred %more;
    ld.param.u64 %at, [base];
    ld.param.u64 %left, [length];
    mov.u32 %one, 1;
again:
    st.global.u8 [%at], %one;
    add.u64 %at, %at, 4096;
    setp.gt.u64 %more, %left, 4096;
    sub.u64 %left, %left, 4096;
    @%more bra again;
    ret;
}
";

/// Splitmix64: enough for choices, and the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        // Splitmix of the seed's successor: any seed will do, also 0.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }
}
