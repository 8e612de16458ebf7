//! Who may change limits. Reading is free.
//!
//! uid 0 always may. On the system bus, polkit decides about everybody else; where there is no polkit, and on
//! every other transport, nobody else may.

use zbus::{Connection, fdo, message::Header, names::BusName};

use super::polkit::{self, Answer};

/// How the caller of a method is identified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// By the kernel's credentials of the caller's socket.
    Uid(u32),
    /// By asking the bus for the sender's uid.
    Sender {
        /// Whether polkit decides about callers that are not root.
        polkit: bool,
    },
}

/// Why the caller may not.
#[derive(Debug, thiserror::Error)]
pub(super) enum Denied {
    /// Not root, and there is nobody to ask.
    #[error(
        "changing limits needs root here (the caller has uid {uid}); run the command as root, for example with sudo"
    )]
    NotRoot {
        /// The caller.
        uid: u32,
    },
    /// polkit is not on the bus.
    #[error(
        "changing limits needs root because polkit is not running (the caller has uid {uid}); run the command as root, or install polkit"
    )]
    NoPolkit {
        /// The caller.
        uid: u32,
    },
    /// polkit said no.
    #[error(
        "polkit does not allow uid {uid} the action {action}; run the command as root, or let the admin allow it by a polkit rule",
        action = super::wire::POLKIT_ACTION
    )]
    Polkit {
        /// The caller.
        uid: u32,
    },
    /// polkit would ask for a password and could not.
    #[error(
        "polkit wants an administrator's password for the action {action} and could not ask for it; run the command as root, or in a session with a polkit agent",
        action = super::wire::POLKIT_ACTION
    )]
    NeedsAgent,
    /// The user closed the dialog.
    #[error("the authentication was cancelled")]
    Dismissed,
    /// The bus or polkit gave no usable answer.
    #[error("it could not be found out whether the caller may change limits: {0}")]
    Unknown(#[from] zbus::Error),
}

impl Access {
    /// Checks that the sender of `header` may change something.
    ///
    /// `what` is shown to the user whom polkit asks for a password.
    pub(super) async fn check(
        self,
        connection: &Connection,
        header: &Header<'_>,
        what: &str,
    ) -> Result<(), Denied> {
        let (uid, polkit) = match self {
            Self::Uid(uid) => (uid, false),
            Self::Sender { polkit } => (sender_uid(connection, header).await?, polkit),
        };
        if uid == 0 {
            return Ok(());
        }
        if !polkit {
            return Err(Denied::NotRoot { uid });
        }
        match polkit::ask(connection, header, what).await? {
            Answer::Allowed => Ok(()),
            Answer::Refused => Err(Denied::Polkit { uid }),
            Answer::NeedsAgent => Err(Denied::NeedsAgent),
            Answer::Dismissed => Err(Denied::Dismissed),
            Answer::NotRunning => Err(Denied::NoPolkit { uid }),
        }
    }
}

async fn sender_uid(connection: &Connection, header: &Header<'_>) -> Result<u32, zbus::Error> {
    let sender = header.sender().ok_or(zbus::Error::MissingField)?.to_owned();
    let bus = fdo::DBusProxy::new(connection).await?;
    Ok(bus
        .get_connection_unix_user(BusName::Unique(sender))
        .await?)
}
