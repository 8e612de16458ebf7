//! `record`: utilisation, memory, power and what each tenant has of it, at steps of milliseconds, to a file.
//!
//! NVML is asked from here, so that it costs the daemon nothing and ends with this command. [`table`] and `parquet` write the
//! rows, [`plot`] draws them; all are pure. [`sink`] is the file.

#[cfg(feature = "parquet")]
mod parquet;
mod plot;
mod sink;
mod table;

use std::{
    collections::BTreeMap,
    path::Path,
    time::{Duration, Instant},
};

use gpuquota_enforcer::client::Client;
use nvml_wrapper::{Device, Nvml, enums::device::UsedGpuMemory, error::NvmlError};

use self::{
    sink::Sink,
    table::{Rest, Row},
};
use crate::{
    args::RecordArgs,
    error::Error,
    output::{clean, counted, print},
};

/// Looks that are made before it starts, to see how long one takes.
const TRIALS: usize = 20;
/// Rows that a file may have: some 200 MB of text.
const MOST_ROWS: u64 = 4_000_000;
/// How often it is asked again to which tenants processes belong.
const REFRESH: Duration = Duration::from_secs(1);
/// Processes whose tenant is remembered.
const KNOWN: usize = 4096;

/// `record`
pub async fn record(client: &Client, arguments: &RecordArgs) -> Result<(), Error> {
    sink::known(arguments.format)?;
    let nvml = open(arguments).map_err(|error| trouble(&error))?;
    let devices = devices(&nvml, arguments.gpu)?;
    let mut tenants = Tenants::new(client.clone());
    let took = trial(&devices, &mut tenants).await?;
    refuse_too_fast(took, arguments.interval, devices.len())?;
    refuse_too_many(arguments, devices.len())?;
    let path = &arguments.output;
    let mut out = Sink::create(path, arguments.format)?;
    let mut kept = arguments.plot.is_some().then(Vec::new);
    let mut gaps = Gaps::default();
    let start = Instant::now();
    let mut due = start;
    while start.elapsed() < arguments.duration {
        let at = start.elapsed();
        gaps.note(at);
        for device in &devices {
            let rows = look(device, at, &mut tenants).map_err(|error| trouble(&error))?;
            for row in rows {
                out.put(&row).map_err(|source| file_error(path, source))?;
                if let Some(kept) = &mut kept {
                    kept.push(row);
                }
            }
        }
        tenants.refresh().await;
        due += arguments.interval;
        let now = Instant::now();
        if due > now {
            tokio::time::sleep(due - now).await;
        } else {
            // What was missed is not made up for: the rows say when they were made.
            due = now;
        }
    }
    out.finish().map_err(|source| file_error(path, source))?;
    if let (Some(plot), Some(rows)) = (&arguments.plot, kept) {
        std::fs::write(plot, plot::svg(&rows)).map_err(|source| file_error(plot, source))?;
    }
    print(&format!(
        "{}, {} apart in the median, the longest pause {}\n",
        counted(gaps.looks(), "look"),
        milliseconds(gaps.median()),
        milliseconds(gaps.longest())
    ))
}

fn file_error(path: &Path, source: std::io::Error) -> Error {
    Error::File {
        path: path.to_owned(),
        source,
    }
}

fn trouble(error: &NvmlError) -> Error {
    Error::Nvml(error.to_string())
}

fn open(arguments: &RecordArgs) -> Result<Nvml, NvmlError> {
    let name = arguments
        .nvml_library
        .as_deref()
        .map_or(std::ffi::OsStr::new("libnvidia-ml.so.1"), Path::as_os_str);
    Nvml::builder().lib_path(name).init()
}

fn devices(nvml: &Nvml, gpu: Option<u32>) -> Result<Vec<(u32, Device<'_>)>, Error> {
    let count = nvml.device_count().map_err(|error| trouble(&error))?;
    let wanted: Vec<u32> = match gpu {
        Some(gpu) if gpu >= count => {
            return Err(Error::Usage(format!(
                "no GPU {gpu}: this host has {}, counted from 0",
                counted(usize::try_from(count).unwrap_or(0), "GPU")
            )));
        }
        Some(gpu) => vec![gpu],
        None => (0..count).collect(),
    };
    wanted
        .into_iter()
        .map(|index| {
            let device = nvml.device_by_index(index);
            device
                .map(|device| (index, device))
                .map_err(|error| trouble(&error))
        })
        .collect()
}

/// How long one look takes, in the median.
async fn trial(devices: &[(u32, Device<'_>)], tenants: &mut Tenants) -> Result<Duration, Error> {
    let mut took = Vec::with_capacity(TRIALS);
    for _ in 0..TRIALS {
        let start = Instant::now();
        for device in devices {
            look(device, Duration::ZERO, tenants).map_err(|error| trouble(&error))?;
        }
        took.push(start.elapsed());
        tenants.refresh().await;
    }
    took.sort();
    Ok(took[TRIALS / 2])
}

fn refuse_too_fast(took: Duration, interval: Duration, gpus: usize) -> Result<(), Error> {
    if took <= interval {
        return Ok(());
    }
    let least = took.as_millis() + 1;
    Err(Error::Usage(format!(
        "NVML takes {} for one look at {}: --interval {least}ms is the shortest that this host can do{}",
        milliseconds(took),
        counted(gpus, "GPU"),
        if gpus > 1 {
            ", or look at one of them (--gpu)"
        } else {
            ""
        }
    )))
}

/// Rows are at least one for each look and GPU; tenants come on top.
fn refuse_too_many(arguments: &RecordArgs, gpus: usize) -> Result<(), Error> {
    let looks = arguments.duration.as_micros() / arguments.interval.as_micros().max(1);
    let rows = u64::try_from(looks)
        .unwrap_or(u64::MAX)
        .saturating_mul(u64::try_from(gpus).unwrap_or(1));
    if rows <= MOST_ROWS {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "that would be {rows} rows or more, and {MOST_ROWS} are allowed: record for a shorter time or at longer steps"
    )))
}

fn milliseconds(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1000.0)
}

/// One look at a GPU: a row for the card, and one for each tenant with processes on it.
fn look(
    (index, device): &(u32, Device<'_>),
    at: Duration,
    tenants: &mut Tenants,
) -> Result<Vec<Row>, NvmlError> {
    let utilization = device.utilization_rates()?;
    let mut rows = vec![Row {
        at,
        gpu: *index,
        tenant: None,
        percent: Some(utilization.gpu),
        memory: device.memory_info()?.used,
        rest: Some(Rest {
            memory_percent: utilization.memory,
            power_mw: device.power_usage().ok(),
        }),
    }];
    let mut by_tenant: BTreeMap<String, (u64, Option<u32>)> = BTreeMap::new();
    for process in device.running_compute_processes()? {
        let UsedGpuMemory::Used(bytes) = process.used_gpu_memory else {
            continue;
        };
        if let Some(tenant) = tenants.of(process.pid) {
            by_tenant.entry(tenant).or_default().0 += bytes;
        }
    }
    for (pid, percent) in tenants.newest(*index, device)? {
        if let Some(tenant) = tenants.of(pid) {
            let (_, sum) = by_tenant.entry(tenant).or_default();
            *sum = Some(sum.unwrap_or(0) + percent);
        }
    }
    rows.extend(
        by_tenant
            .into_iter()
            .map(|(tenant, (memory, percent))| Row {
                at,
                gpu: *index,
                tenant: Some(tenant),
                percent,
                memory,
                rest: None,
            }),
    );
    Ok(rows)
}

/// Which tenant a process is in, and what NVML last said of it.
struct Tenants {
    client: Client,
    known: BTreeMap<u32, Option<String>>,
    unknown: Vec<u32>,
    asked: Instant,
    /// By GPU: when its newest sample was made, and the percent of each process in it.
    samples: BTreeMap<u32, (u64, BTreeMap<u32, u32>)>,
}

impl Tenants {
    fn new(client: Client) -> Self {
        Self {
            client,
            known: BTreeMap::new(),
            unknown: Vec::new(),
            asked: Instant::now(),
            samples: BTreeMap::new(),
        }
    }

    /// The tenant of a process; none for strangers and for those that are not known yet.
    fn of(&mut self, pid: u32) -> Option<String> {
        if let Some(tenant) = self.known.get(&pid) {
            return tenant.clone();
        }
        if !self.unknown.contains(&pid) && self.unknown.len() < KNOWN {
            self.unknown.push(pid);
        }
        None
    }

    /// Asks the daemon about new processes, and once in a while about the others: a process may be moved, its number used
    /// again.
    async fn refresh(&mut self) {
        if self.asked.elapsed() >= REFRESH {
            self.asked = Instant::now();
            self.unknown = self.known.keys().copied().collect();
            self.known.clear();
        }
        for pid in std::mem::take(&mut self.unknown) {
            // A process that has ended or is in no tenant is nobody's.
            let tenant = self.client.tenant_by_pid(pid).await.ok();
            self.known
                .insert(pid, tenant.map(|tenant| clean(&tenant.name)));
        }
    }

    /// What each process used of a GPU by NVML's newest samples. The driver makes them every 20 ms or so at best, others keep
    /// what they had.
    fn newest(&mut self, gpu: u32, device: &Device<'_>) -> Result<BTreeMap<u32, u32>, NvmlError> {
        let (last, percents) = self.samples.entry(gpu).or_default();
        let samples = match device.process_utilization_stats(*last) {
            Ok(samples) => samples,
            // Nothing new, or nobody there.
            Err(NvmlError::NotFound | NvmlError::NotSupported) => return Ok(percents.clone()),
            Err(error) => return Err(error),
        };
        if let Some(newest) = samples.iter().map(|sample| sample.timestamp).max()
            && newest > *last
        {
            *last = newest;
            let mut of_process: BTreeMap<u32, (u64, u32)> = BTreeMap::new();
            for sample in samples {
                let entry = of_process.entry(sample.pid).or_default();
                if sample.timestamp >= entry.0 {
                    *entry = (sample.timestamp, sample.sm_util);
                }
            }
            *percents = of_process
                .into_iter()
                .map(|(pid, (_, percent))| (pid, percent))
                .collect();
        }
        Ok(percents.clone())
    }
}

/// Time between looks.
#[derive(Debug, Default)]
struct Gaps {
    last: Option<Duration>,
    micros: Vec<u32>,
}

impl Gaps {
    fn note(&mut self, at: Duration) {
        if let Some(last) = self.last.replace(at) {
            let gap = at.saturating_sub(last).as_micros();
            self.micros.push(u32::try_from(gap).unwrap_or(u32::MAX));
        }
    }

    fn looks(&self) -> usize {
        self.micros.len() + usize::from(self.last.is_some())
    }

    fn median(&self) -> Duration {
        let mut sorted = self.micros.clone();
        sorted.sort_unstable();
        let micros = sorted.get(sorted.len() / 2).copied().unwrap_or(0);
        Duration::from_micros(micros.into())
    }

    fn longest(&self) -> Duration {
        Duration::from_micros(self.micros.iter().max().copied().unwrap_or(0).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_that_nvml_cannot_keep_is_refused_with_the_one_it_can() {
        let millis = Duration::from_millis;
        assert!(refuse_too_fast(millis(5), millis(5), 2).is_ok());
        let error = refuse_too_fast(Duration::from_micros(7_300), millis(5), 2)
            .expect_err("too fast")
            .to_string();
        assert_eq!(
            error,
            "NVML takes 7.30 ms for one look at 2 GPUs: --interval 8ms is the shortest that this host can do, or look at one of \
             them (--gpu)"
        );
    }

    #[test]
    fn the_pace_that_was_kept_is_told() {
        let mut gaps = Gaps::default();
        assert_eq!((gaps.looks(), gaps.median()), (0, Duration::ZERO));
        for at in [0, 5, 10, 15, 40] {
            gaps.note(Duration::from_millis(at));
        }
        assert_eq!(gaps.looks(), 5);
        assert_eq!(gaps.median(), Duration::from_millis(5));
        assert_eq!(gaps.longest(), Duration::from_millis(25));
    }
}
