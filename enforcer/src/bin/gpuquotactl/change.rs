//! Verbs that change something: set-property, reset-property, reload.

use gpuquota_enforcer::{
    client::Client,
    control::{Held, QuotaChange},
};

use crate::{
    args::Hold,
    error::Error,
    output::{clean, counted, print, print_json},
};

/// `set-property`
pub async fn set(client: &Client, change: &QuotaChange) -> Result<(), Error> {
    let file = client.set_quota(change).await?;
    let until = if change.runtime {
        ", until the next boot"
    } else {
        ""
    };
    print(&format!("Kept in {}{until}.\n", clean(&file)))
}

/// `reset-property`
pub async fn reset(client: &Client, tenant: &str, properties: &[String]) -> Result<(), Error> {
    Ok(client.reset_quota(tenant, properties).await?)
}

/// `freeze`
pub async fn freeze(client: &Client, hold: &Hold) -> Result<(), Error> {
    let outcome = client.freeze(&hold.tenant, hold.gpu.as_deref()).await?;
    report_uncontrolled(&outcome);
    print(&format!(
        "{} is frozen: {}.\n",
        clean(&hold.tenant),
        processes(outcome.frozen.len())
    ))
}

/// `thaw`
pub async fn thaw(client: &Client, hold: &Hold) -> Result<(), Error> {
    let outcome = client.thaw(&hold.tenant, hold.gpu.as_deref()).await?;
    report_uncontrolled(&outcome);
    if outcome.frozen.is_empty() {
        return print(&format!("{} goes on.\n", clean(&hold.tenant)));
    }
    print(&format!(
        "{} is frozen for another reason, see `gpuquotactl status {}`: {}.\n",
        clean(&hold.tenant),
        clean(&hold.tenant),
        processes(outcome.frozen.len())
    ))
}

fn processes(number: usize) -> String {
    match number {
        1 => "1 process".to_owned(),
        _ => format!("{number} processes"),
    }
}

fn report_uncontrolled(held: &Held) {
    for process in &held.uncontrolled {
        eprintln!("process {}: {}", process.pid, clean(&process.why));
    }
}

/// `reload`
pub async fn reload(client: &Client, json: bool) -> Result<(), Error> {
    let loaded = client.reload().await?;
    if json {
        return print_json(&loaded);
    }
    for warning in &loaded.warnings {
        // Rendered over several lines by the daemon.
        eprintln!("{}", clean_lines(warning));
    }
    print(&format!(
        "Policy {} is in force: {}.\n",
        loaded.generation,
        counted(loaded.tenants as usize, "tenant")
    ))
}

/// [`clean`], but keeps line feeds.
pub fn clean_lines(text: &str) -> String {
    text.lines().map(clean).collect::<Vec<_>>().join("\n")
}
