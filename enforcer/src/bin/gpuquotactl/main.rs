//! `gpuquotactl`: looks at and changes the GPU quotas of this host.

mod args;
mod change;
mod error;
mod faults;
mod generate;
mod history;
mod idle;
mod kubernetes;
mod launches;
mod leaks;
mod look;
mod monitor;
mod output;
mod policy;
mod profile;
mod read;
mod record;
mod report;
mod run;
mod top;

use std::process::ExitCode;

use clap::Parser;
use gpuquota_enforcer::{client::Client, config::Bus, control::QuotaChange};

use self::{
    args::{Cli, Command, PolicyCommand, Verb},
    error::Error,
    read::Which,
};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        // Without a runtime: the command inherits what this process is.
        Command::Run(arguments) => run::run(arguments),
        Command::Verb(verb) => block_on(dispatch(&cli.bus, verb)).map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        error::report(&error);
        ExitCode::from(error.exit_code())
    })
}

fn block_on(verb: impl Future<Output = Result<(), Error>>) -> Result<(), Error> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Error::Start)?
        .block_on(verb)
}

async fn dispatch(bus: &Bus, verb: Verb) -> Result<(), Error> {
    let connect = || Client::connect(bus);
    match verb {
        Verb::List(json) => read::list(&connect().await?, json.json).await,
        Verb::Status { tenant, pid, json } => {
            let which = match (tenant, pid) {
                (Some(tenant), _) => Which::Named(tenant),
                (None, Some(pid)) => Which::OfProcess(pid),
                (None, None) => Which::All,
            };
            read::status(&connect().await?, which, json.json).await
        }
        Verb::History {
            tenant,
            since,
            json,
        } => history::history(&connect().await?, tenant.as_deref(), since, json.json).await,
        Verb::Record(arguments) => record::record(&connect().await?, &arguments).await,
        Verb::Report { since, output } => {
            report::report(&connect().await?, since, output.as_ref()).await
        }
        Verb::SetProperty {
            tenant,
            properties,
            gpu,
            runtime,
        } => {
            let change = QuotaChange {
                tenant,
                gpu,
                properties,
                runtime,
            };
            change::set(&connect().await?, &change).await
        }
        Verb::ResetProperty { tenant, properties } => {
            change::reset(&connect().await?, &tenant, &properties).await
        }
        Verb::Freeze(hold) => change::freeze(&connect().await?, &hold).await,
        Verb::Thaw(hold) => change::thaw(&connect().await?, &hold).await,
        Verb::Top(arguments) => top::top(bus, &arguments).await,
        Verb::Reload(json) => change::reload(&connect().await?, json.json).await,
        Verb::Monitor { tenant, json } => {
            monitor::monitor(&connect().await?, tenant.as_deref(), json.json).await
        }
        Verb::Policy(PolicyCommand::Check { files, json }) => policy::check(&files, json.json),
        Verb::Policy(PolicyCommand::Show { files, json }) => policy::show(&files, json.json),
        Verb::Policy(PolicyCommand::Explain {
            tenant,
            gpu,
            files,
            json,
        }) => policy::explain(&files, &tenant, gpu.as_ref(), bus, json.json).await,
        Verb::Idle(arguments) => idle::idle(&connect().await?, &arguments).await,
        Verb::Leaks(arguments) => leaks::leaks(&connect().await?, &arguments).await,
        Verb::Profile(arguments) => profile::profile(&connect().await?, &arguments).await,
        Verb::Doctor(json) => read::doctor(bus, json.json).await,
        Verb::KubernetesSync(arguments) => kubernetes::sync(bus, &arguments).await,
        Verb::Version(json) => read::version(bus, json.json).await,
        Verb::Completions { shell } => generate::completions(shell),
        Verb::Man { directory } => generate::man(&directory),
        Verb::DumpState => read::dump_state(&connect().await?).await,
    }
}
