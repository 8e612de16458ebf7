//! The served interfaces of looks into processes for a while: `org.gpuquota.Enforcer1.Leaks`, `.Profile` and `.Idle`.
//!
//! They have one shape: start, get, stop, list. Reading what was found needs authorization too: it shows how programs of
//! tenants work.

use std::{sync::Arc, time::Duration};

use serde::Serialize;
use zbus::{Connection, interface, message::Header};

use super::{
    Control, ControlError,
    access::Access,
    leaks::Target,
    manager::{MethodError, Shared, check_strings},
};

/// What the three have in common; one per connection.
#[derive(Clone)]
pub(super) struct Looks {
    pub(super) shared: Arc<Shared>,
    pub(super) access: Access,
}

/// Who calls, and whom to look into.
struct Asked<'a>(&'a Connection, &'a Header<'a>, String);

impl Looks {
    async fn ask<T: Send + 'static>(
        &self,
        asked: Asked<'_>,
        call: impl FnOnce(&dyn Control, Target) -> Result<T, ControlError> + Send + 'static,
    ) -> Result<T, MethodError> {
        let Asked(connection, header, target) = asked;
        check_strings([target.as_str()])?;
        self.shared
            .authorize(
                self.access,
                connection,
                header,
                "look into processes that use GPUs",
            )
            .await?;
        let answer = self
            .shared
            .call(move |control| call(control, Target::parse(&target)))
            .await?;
        Ok(answer?)
    }

    async fn start(
        &self,
        asked: Asked<'_>,
        limit_usec: u64,
        begin: fn(&dyn Control, Target, Duration) -> Result<(), ControlError>,
    ) -> Result<(), MethodError> {
        let limit = Duration::from_micros(limit_usec);
        self.ask(asked, move |control, target| begin(control, target, limit))
            .await
    }

    /// A report as JSON.
    async fn tell<R: Serialize + Send + 'static>(
        &self,
        asked: Asked<'_>,
        read: fn(&dyn Control, &Target) -> Result<R, ControlError>,
    ) -> Result<String, MethodError> {
        let report = self
            .ask(asked, move |control, target| read(control, &target))
            .await?;
        serde_json::to_string(&report).map_err(|error| MethodError::failed(error.to_string()))
    }

    async fn list(
        &self,
        list: fn(&dyn Control) -> Vec<Target>,
    ) -> Result<Vec<String>, MethodError> {
        let targets = self.shared.call(list).await?;
        Ok(targets.iter().map(ToString::to_string).collect())
    }
}

/// An interface of looks of one kind: its members, and what each asks the daemon.
macro_rules! looks_interface {
    (
        $(#[$doc:meta])*
        $type:ident, $name:literal,
        start: $start:ident, get: $get:ident = $report:ident, stop: $stop:ident, list: $list:ident = $targets:ident
    ) => {
        $(#[$doc])*
        pub(super) struct $type(pub(super) Looks);

        #[interface(name = $name, introspection_docs = false)]
        impl $type {
            /// Begins to look at a tenant or, where `target` is a number, at a process, for so long at most.
            async fn $start(
                &self,
                target: String,
                limit_usec: u64,
                #[zbus(connection)] connection: &Connection,
                #[zbus(header)] header: Header<'_>,
            ) -> Result<(), MethodError> {
                let asked = Asked(connection, &header, target);
                self.0.start(asked, limit_usec, Control::$start).await
            }

            /// What was found so far, as JSON.
            #[zbus(out_args("json"))]
            async fn $get(
                &self,
                target: String,
                #[zbus(connection)] connection: &Connection,
                #[zbus(header)] header: Header<'_>,
            ) -> Result<String, MethodError> {
                let asked = Asked(connection, &header, target);
                self.0.tell(asked, Control::$report).await
            }

            /// Ends the look, its probes with it, and tells what was found.
            #[zbus(out_args("json"))]
            async fn $stop(
                &self,
                target: String,
                #[zbus(connection)] connection: &Connection,
                #[zbus(header)] header: Header<'_>,
            ) -> Result<String, MethodError> {
                let asked = Asked(connection, &header, target);
                self.0.tell(asked, Control::$stop).await
            }

            /// Who is or was looked at.
            #[zbus(out_args("targets"))]
            async fn $list(&self) -> Result<Vec<String>, MethodError> {
                self.0.list(Control::$targets).await
            }
        }
    };
}

looks_interface! {
    /// Follows allocations: `Leaks`.
    LeakFinder, "org.gpuquota.Enforcer1.Leaks",
    start: start_leaks, get: get_leaks = leaks, stop: stop_leaks, list: list_leaks = leak_targets
}

looks_interface! {
    /// Profiles launches: `Profile`.
    Profiler, "org.gpuquota.Enforcer1.Profile",
    start: start_profile, get: get_profile = profile, stop: stop_profile, list: list_profiles = profile_targets
}

looks_interface! {
    /// Follows threads while a GPU is idle: `Idle`.
    IdleWatch, "org.gpuquota.Enforcer1.Idle",
    start: start_idle, get: get_idle = idle, stop: stop_idle, list: list_idle = idle_targets
}
