//! Asking polkit whether the sender of a message may change limits.

use std::{collections::HashMap, time::Duration};

use zbus::{
    Connection, fdo,
    message::{Flags, Header},
};
use zbus_polkit::policykit1::{AuthorityProxy, CheckAuthorizationFlags, Subject};

use super::wire::POLKIT_ACTION;

/// How long a user may take to type a password.
const INTERACTIVE_TIMEOUT: Duration = Duration::from_mins(2);
/// How long polkit may take when it asks nobody.
const TIMEOUT: Duration = Duration::from_secs(10);

/// What polkit said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Allowed,
    Refused,
    /// A password would help, but nobody could be asked.
    NeedsAgent,
    /// The user closed the dialog.
    Dismissed,
    /// There is no polkit on this bus.
    NotRunning,
}

/// Asks about the sender of `header`; polkit may ask the user only if the caller of the method allows that.
///
/// The subject is the sender's name on the bus, which the bus itself vouches for.
pub(super) async fn ask(
    connection: &Connection,
    header: &Header<'_>,
    what: &str,
) -> Result<Answer, zbus::Error> {
    let subject = Subject::new_for_message_header(header)
        .map_err(|error| zbus::Error::Failure(error.to_string()))?;
    let interactive = header
        .primary()
        .flags()
        .contains(Flags::AllowInteractiveAuth);
    let timeout = if interactive {
        INTERACTIVE_TIMEOUT
    } else {
        TIMEOUT
    };
    let flags = interactive
        .then_some(CheckAuthorizationFlags::AllowUserInteraction)
        .into_iter()
        .collect();
    let details = HashMap::from([
        (
            "polkit.message",
            "Authentication is required to $(operation)",
        ),
        ("operation", what),
    ]);
    let authority = match AuthorityProxy::new(connection).await {
        Ok(authority) => authority,
        Err(error) if is_absent(&error) => return Ok(Answer::NotRunning),
        Err(error) => return Err(error),
    };
    let check = authority.check_authorization(&subject, POLKIT_ACTION, &details, flags, "");
    let result = match tokio::time::timeout(timeout, check).await {
        Ok(Ok(result)) => result,
        Ok(Err(error)) if is_absent(&error) => return Ok(Answer::NotRunning),
        Ok(Err(error)) => return Err(error),
        Err(_) => {
            let text = format!("polkit did not answer within {} s", timeout.as_secs());
            return Err(zbus::Error::Failure(text));
        }
    };
    Ok(if result.is_authorized {
        Answer::Allowed
    } else if result.details.contains_key("polkit.dismissed") {
        Answer::Dismissed
    } else if result.is_challenge {
        Answer::NeedsAgent
    } else {
        Answer::Refused
    })
}

/// Whether the error means that nobody owns polkit's name and nobody can be started.
fn is_absent(error: &zbus::Error) -> bool {
    match error {
        zbus::Error::FDO(error) => matches!(
            **error,
            fdo::Error::ServiceUnknown(_)
                | fdo::Error::NameHasNoOwner(_)
                | fdo::Error::SpawnServiceNotFound(_)
        ),
        zbus::Error::MethodError(name, ..) => matches!(
            name.as_str(),
            "org.freedesktop.DBus.Error.ServiceUnknown"
                | "org.freedesktop.DBus.Error.NameHasNoOwner"
                | "org.freedesktop.DBus.Error.Spawn.ServiceNotFound"
        ),
        _ => false,
    }
}
