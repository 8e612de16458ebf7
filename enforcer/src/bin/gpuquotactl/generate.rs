//! Completion scripts and manual pages, both from the definition of the command line.

use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::{args::Cli, error::Error, output::print};

/// `completions`
pub fn completions(shell: Shell) -> Result<(), Error> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "gpuquotactl", &mut script);
    print(&String::from_utf8_lossy(&script))
}

/// `man`: one page for the program and one for every verb.
pub fn man(directory: &Path) -> Result<(), Error> {
    clap_mangen::generate_to(Cli::command(), directory).map_err(Error::file(directory))
}
