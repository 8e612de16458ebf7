//! GPU faults, as `monitor` shows them.

use gpuquota_enforcer::control::Notice;

use crate::output::Style;

/// A line about a fault.
pub fn describe(notice: &Notice) -> (Style, String) {
    let Notice::Xid {
        tenant,
        gpu,
        xid,
        pid,
        certainty,
        action,
        message,
        ..
    } = notice
    else {
        return (Style::Plain, String::new());
    };
    let tenant = if tenant.is_empty() {
        "no tenant"
    } else {
        tenant
    };
    let who = if certainty == "process" {
        format!("process {pid}")
    } else {
        "one of those on it, not known who".to_owned()
    };
    let follows = match action.as_str() {
        "freeze" => "; the tenant is frozen",
        "kill" => "; the process is ended",
        _ => "",
    };
    let said = if message.is_empty() {
        String::new()
    } else {
        format!(" ({message})")
    };
    (
        Style::Bad,
        format!("xid       {tenant}: Xid {xid} on GPU {gpu}, {who}{follows}{said}"),
    )
}
