//! `run`: a command inside a tenant.

use std::process::ExitCode;

use gpuquota_enforcer::notify::runner::{self, RunOptions};

use crate::{args::RunArgs, error::Error};

/// Runs the command to its end and exits as it did.
pub fn run(arguments: RunArgs) -> Result<ExitCode, Error> {
    let mut words = arguments.command.into_iter();
    let options = RunOptions {
        tenant: arguments.tenant,
        gpus: arguments.gpus,
        uid: arguments.uid,
        gid: arguments.gid,
        socket: arguments.socket,
        // clap requires at least one word.
        command: words.next().unwrap_or_default(),
        args: words.collect(),
    };
    Ok(ExitCode::from(runner::run(&options)?))
}
