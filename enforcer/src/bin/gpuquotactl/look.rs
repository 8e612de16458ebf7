//! What the verbs that look into processes for a while have in common.

use std::{fmt::Write as _, time::Duration};

use gpuquota_enforcer::control::leaks::Target;

use crate::{
    error::Error,
    output::{self, clean},
};

/// Waits until a look that has begun is over, or until interrupted; says so unless the output is for programs.
pub async fn wait(what: &str, target: &Target, duration: Duration, json: bool) {
    if !json {
        eprintln!(
            "{what} of {target} for {:.0} s; interrupt to end now",
            duration.as_secs_f64()
        );
    }
    tokio::select! {
        () = tokio::time::sleep(duration) => {}
        // Nothing to tell apart: without a handler the signal would have ended this program.
        _ = tokio::signal::ctrl_c() => {}
    }
}

/// Shows whose looks there are, or what to say where there are none.
pub fn list(targets: &[Target], json: bool, none: &str) -> Result<(), Error> {
    if json {
        return output::print_json(&targets);
    }
    if targets.is_empty() {
        return output::print(none);
    }
    let mut lines = String::new();
    for target in targets {
        // Writing to a string cannot fail.
        let _ = writeln!(lines, "{}", clean(&target.to_string()));
    }
    output::print(&lines)
}
