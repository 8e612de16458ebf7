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

/// Follows allocations: `Leaks`.
pub(super) struct LeakFinder(pub(super) Looks);

#[interface(name = "org.gpuquota.Enforcer1.Leaks", introspection_docs = false)]
impl LeakFinder {
    /// Follows the allocations of a tenant or, where `target` is a number, of a process, for so long at most.
    async fn start_leaks(
        &self,
        target: String,
        limit_usec: u64,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<(), MethodError> {
        let asked = Asked(connection, &header, target);
        self.0.start(asked, limit_usec, Control::start_leaks).await
    }

    /// What was found so far, as JSON.
    #[zbus(out_args("json"))]
    async fn get_leaks(
        &self,
        target: String,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<String, MethodError> {
        let asked = Asked(connection, &header, target);
        self.0.tell(asked, Control::leaks).await
    }

    /// Removes the probes, and tells what was found.
    #[zbus(out_args("json"))]
    async fn stop_leaks(
        &self,
        target: String,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<String, MethodError> {
        let asked = Asked(connection, &header, target);
        self.0.tell(asked, Control::stop_leaks).await
    }

    /// Whose allocations are or were followed.
    #[zbus(out_args("targets"))]
    async fn list_leaks(&self) -> Result<Vec<String>, MethodError> {
        self.0.list(Control::leak_targets).await
    }
}

/// Profiles launches: `Profile`.
pub(super) struct Profiler(pub(super) Looks);

#[interface(name = "org.gpuquota.Enforcer1.Profile", introspection_docs = false)]
impl Profiler {
    /// Profiles the launches of a tenant or, where `target` is a number, of a process, for so long at most.
    async fn start_profile(
        &self,
        target: String,
        limit_usec: u64,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<(), MethodError> {
        let asked = Asked(connection, &header, target);
        self.0
            .start(asked, limit_usec, Control::start_profile)
            .await
    }

    /// What was found so far, as JSON.
    #[zbus(out_args("json"))]
    async fn get_profile(
        &self,
        target: String,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<String, MethodError> {
        let asked = Asked(connection, &header, target);
        self.0.tell(asked, Control::profile).await
    }

    /// Removes the probes, and tells what was found.
    #[zbus(out_args("json"))]
    async fn stop_profile(
        &self,
        target: String,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<String, MethodError> {
        let asked = Asked(connection, &header, target);
        self.0.tell(asked, Control::stop_profile).await
    }

    /// Whose launches are or were profiled.
    #[zbus(out_args("targets"))]
    async fn list_profiles(&self) -> Result<Vec<String>, MethodError> {
        self.0.list(Control::profile_targets).await
    }
}

/// Follows threads while a GPU is idle: `Idle`.
pub(super) struct IdleWatch(pub(super) Looks);

#[interface(name = "org.gpuquota.Enforcer1.Idle", introspection_docs = false)]
impl IdleWatch {
    /// Follows the threads of a tenant or, where `target` is a number, of a process, for so long at most.
    async fn start_idle(
        &self,
        target: String,
        limit_usec: u64,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<(), MethodError> {
        let asked = Asked(connection, &header, target);
        self.0.start(asked, limit_usec, Control::start_idle).await
    }

    /// What was found so far, as JSON.
    #[zbus(out_args("json"))]
    async fn get_idle(
        &self,
        target: String,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<String, MethodError> {
        let asked = Asked(connection, &header, target);
        self.0.tell(asked, Control::idle).await
    }

    /// Ends the look, and tells what was found.
    #[zbus(out_args("json"))]
    async fn stop_idle(
        &self,
        target: String,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<String, MethodError> {
        let asked = Asked(connection, &header, target);
        self.0.tell(asked, Control::stop_idle).await
    }

    /// Whose threads are or were followed.
    #[zbus(out_args("targets"))]
    async fn list_idle(&self) -> Result<Vec<String>, MethodError> {
        self.0.list(Control::idle_targets).await
    }
}
