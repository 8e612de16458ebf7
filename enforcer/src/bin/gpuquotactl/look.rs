//! What the verbs that look into processes for a while have in common.

use std::{fmt::Write as _, time::Duration};

use gpuquota_enforcer::{
    client::{Client, looks::Kind},
    control::leaks::{LeakFrame, Target},
};

use crate::{
    args::LookArgs,
    error::Error,
    output::{self, Screen, Style, clean},
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

/// The first frames of a stack, a line each. `cut` says that there are more than are known.
pub fn frames(frames: &[LeakFrame], cut: bool, most: usize, screen: Screen) -> String {
    let mut text = String::new();
    for frame in frames.iter().take(most) {
        let file = frame.file.rsplit('/').next().unwrap_or_default();
        let place = if frame.function.is_some() && !file.is_empty() {
            screen.paint(Style::Dim, &format!("  ({})", clean(file)))
        } else {
            String::new()
        };
        let _ = writeln!(text, "    {}{place}", clean(&frame.to_string()));
    }
    if cut || frames.len() > most {
        text += "    ...\n";
    }
    text
}

/// What is not known for certain of what a look has found.
#[derive(Default)]
pub struct Remarks(Vec<String>);

impl Remarks {
    /// So many of something, if there are any.
    pub fn count(&mut self, count: u64, what: &str) {
        if count > 0 {
            self.say(format!("{count} {what}"));
        }
    }

    /// Files of which something holds, if there are any.
    pub fn files(&mut self, what: &str, files: &[String]) {
        if !files.is_empty() {
            self.say(format!("{what} {}", clean(&files.join(", "))));
        }
    }

    /// Files whose frames are not all there or not named.
    pub fn stacks(&mut self, unnamed: &[String], too_large: &[String]) {
        self.files("functions are not named by", unnamed);
        self.files("too large to follow stacks through:", too_large);
    }

    /// Anything else.
    pub fn say(&mut self, line: String) {
        self.0.push(line);
    }

    /// A line each.
    pub fn shown(&self, screen: Screen) -> String {
        let mut text = String::new();
        for line in &self.0 {
            let _ = writeln!(text, "{}", screen.paint(Style::Warn, line));
        }
        text
    }
}
