//! What the verbs that look into processes for a while have in common.

use std::{fmt::Write as _, time::Duration};

use gpuquota_enforcer::{
    client::{Client, looks::Kind},
    control::leaks::Target,
};

use crate::{
    args::LookArgs,
    error::Error,
    output::{self, clean},
};

/// What a verb says of its looks.
pub struct Words {
    /// What it does, such as "following the allocations".
    pub doing: &'static str,
    /// What to say where nobody is looked at.
    pub none: &'static str,
}

/// Looks for so long, or until interrupted, and returns what was found; without a target, shows whom is looked at.
pub async fn look<K: Kind>(
    client: &Client,
    arguments: &LookArgs,
    json: bool,
    words: &Words,
) -> Result<Option<K::Report>, Error> {
    let Some(target) = &arguments.target else {
        let targets = client.look_targets::<K>().await?;
        list(&targets, json, words.none)?;
        return Ok(None);
    };
    let target = Target::parse(target);
    let report = if arguments.so_far {
        client.look::<K>(&target).await?
    } else if arguments.stop {
        client.stop_look::<K>(&target).await?
    } else {
        client.start_look::<K>(&target, arguments.duration).await?;
        wait(words.doing, &target, arguments.duration, json).await;
        client.stop_look::<K>(&target).await?
    };
    Ok(Some(report))
}

/// Waits until a look that has begun is over, or until interrupted; says so unless the output is for programs.
async fn wait(what: &str, target: &Target, duration: Duration, json: bool) {
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
fn list(targets: &[Target], json: bool, none: &str) -> Result<(), Error> {
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
