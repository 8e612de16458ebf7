//! gpuquotad: holds tenants to their GPU budgets.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use anyhow::Context as _;
use clap::Parser;
use gpuquota_enforcer::{
    cgroup::Hierarchy,
    config::{Bus, Config, ConfigError},
    control::{self, Control as _},
    enforcer::{Enforcer, EnforcerError, Enrolment},
    heap, journal,
    kernel::{PinDir, launch::Record},
    launch, metrics,
    notify::listener::ListenerSocket,
    systemd, time,
};
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info, warn};
use tracing_subscriber::{
    EnvFilter, fmt::format::debug_fn, layer::SubscriberExt as _, util::SubscriberInitExt as _,
};

/// Exit code for a configuration or policy that does not load (`EX_CONFIG`).
const BAD_CONFIGURATION: u8 = 78;

/// Holds tenants of shared NVIDIA GPUs to their budgets.
#[derive(Parser, Debug)]
#[command(name = "gpuquotad", version)]
struct Arguments {
    /// Settings file; its folder FILE.d is read after it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Where to offer the D-Bus interface: system, session, an address, or peer:PATH for a private socket
    #[arg(long, value_name = "BUS")]
    bus: Option<Bus>,
    /// Detach every program, forget the ledger, and end; no daemon may be running
    #[arg(long)]
    detach_all: bool,
    /// Let everybody go on whom a daemon that is gone has frozen or stopped, and end; no daemon may be running
    #[arg(long)]
    release_all: bool,
    /// How the daemon starts its guard of stopped processes
    #[arg(long, num_args = 2..=4, value_names = ["IDS", "ROOT", "PINS", "DEVICES"], hide = true)]
    launch_guard: Option<Vec<String>>,
    /// Check settings and policy, and end
    #[arg(long)]
    check: bool,
}

fn main() -> ExitCode {
    heap::share_arenas();
    let arguments = Arguments::parse();
    start_logging();
    match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!("{error:#}");
            let bad_configuration = error.downcast_ref::<ConfigError>().is_some()
                || matches!(
                    error.downcast_ref::<EnforcerError>(),
                    Some(
                        EnforcerError::Policy(_)
                            | EnforcerError::Tenancy(_)
                            | EnforcerError::NotOffered(_)
                    )
                );
            if bad_configuration {
                ExitCode::from(BAD_CONFIGURATION)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

/// To the journal where systemd connects us to it, else to standard error; `GPUQUOTA_LOG` filters.
fn start_logging() {
    let filter = EnvFilter::try_from_env("GPUQUOTA_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let registry = tracing_subscriber::registry().with(filter);
    if std::env::var_os("JOURNAL_STREAM").is_some()
        && let Ok(journal) = tracing_journald::layer()
    {
        // Names of fields as docs/logs.md has them.
        registry.with(journal.with_field_prefix(None)).init();
    } else {
        registry
            .with(
                tracing_subscriber::fmt::layer()
                    .fmt_fields(
                        // Message ids are for the journal.
                        debug_fn(|out, field, value| match field.name() {
                            "message_id" => Ok(()),
                            "message" => write!(out, "{value:?} "),
                            name => write!(out, "{name}={value:?} "),
                        }),
                    )
                    .without_time()
                    .with_target(false)
                    .with_writer(std::io::stderr),
            )
            .init();
    }
}

fn run(arguments: Arguments) -> anyhow::Result<()> {
    if let Some([ids, root, frozen @ ..]) = arguments.launch_guard.as_deref() {
        let frozen = match frozen {
            [pins, device_dir] => Some(time::release::Whereabouts {
                pins: pins.into(),
                device_dir: device_dir.into(),
            }),
            _ => None,
        };
        return launch::release::guard(ids, Path::new(root), frozen.as_ref());
    }
    let mut config = Config::load(arguments.config.as_deref())?;
    if let Some(bus) = arguments.bus {
        config.bus = bus;
    }
    if arguments.detach_all {
        PinDir::remove_all(&config.bpf_directory)
            .with_context(|| format!("removing {}", config.bpf_directory.display()))?;
        info!("detached");
        return Ok(());
    }
    if arguments.release_all {
        return release_all(&config);
    }
    if arguments.check {
        Enforcer::check(&config)?;
        info!("settings and policy load");
        return Ok(());
    }
    for warning in config.warnings() {
        warn!("{warning}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("starting the runtime")?;
    runtime.block_on(serve(config))
}

/// Undoes what must not outlive the daemon. Limits stay.
fn release_all(config: &Config) -> anyhow::Result<()> {
    let pins = match PinDir::open(&config.bpf_directory) {
        Ok(pins) => pins,
        // Without pins nothing is known, and nothing was left: then daemons write nothing down.
        Err(error) => {
            warn!("{}: {error}", config.bpf_directory.display());
            return Ok(());
        }
    };
    let continued = continue_stopped(config, &pins).context("continuing processes");
    time::release::after_daemon(&pins, &config.gpu.device_dir).context("thawing")?;
    continued
}

/// Continues whom a daemon stopped or froze for launches.
fn continue_stopped(config: &Config, pins: &PinDir) -> anyhow::Result<()> {
    if let Some(record) = Record::pinned(pins)? {
        let hierarchy = Hierarchy::open(config.cgroup_root.as_deref())?;
        let count = launch::release::all_for_good(&record, &hierarchy)?;
        info!(count, "continued");
    }
    Ok(())
}

async fn serve(config: Config) -> anyhow::Result<()> {
    // Taken before anything is started: a signal in between is not lost.
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
    let mut hangup = signal(SignalKind::hangup()).context("SIGHUP")?;
    std::fs::create_dir_all(&config.runtime_directory)
        .with_context(|| format!("making {}", config.runtime_directory.display()))?;
    let (enforcer, events) = Enforcer::start(config)?;
    let watch = enforcer.watch(events)?;
    let socket = ListenerSocket::bind(
        &enforcer.config().listener_socket(),
        Arc::new(Enrolment(Arc::clone(&enforcer))),
    )?;
    let server = control::dbus::serve(&enforcer.config().bus, Arc::clone(&enforcer) as _).await?;
    tokio::spawn(journal::follow(enforcer.subscribe()));
    let metrics = match enforcer.config().metrics_address {
        Some(address) => {
            let enforcer = Arc::clone(&enforcer);
            let look = move || {
                heap::used();
                enforcer.measure()
            };
            let endpoint = metrics::server::serve(address, look, metrics::render).await?;
            info!("metrics at http://{}/metrics", endpoint.address());
            Some(endpoint)
        }
        None => None,
    };
    // Only now: policy in the maps, hooks attached, sockets open.
    systemd::tell(&[NotifyState::Ready]);
    info!("ready");
    if let Some(limit) = sd_notify::watchdog_enabled() {
        tokio::spawn(systemd::give_signs_of_life(Arc::clone(&enforcer), limit));
    }
    loop {
        tokio::select! {
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            _ = hangup.recv() => {
                let reloading = NotifyState::monotonic_usec_now().ok();
                systemd::tell(&[NotifyState::Reloading]);
                if let Some(now) = reloading {
                    systemd::tell(&[now]);
                }
                let enforcer = Arc::clone(&enforcer);
                let outcome = tokio::task::spawn_blocking(move || enforcer.reload_policy()).await;
                match outcome {
                    // A failure is told where it happens.
                    Ok(_) => {}
                    Err(error) => error!(%error, "reload"),
                }
                systemd::tell(&[NotifyState::Ready]);
            }
        }
    }
    systemd::tell(&[NotifyState::Stopping]);
    info!("stopping; limits of running commands are kept by their runners");
    drop((socket, metrics));
    server.shutdown().await;
    watch.stop();
    Ok(())
}
