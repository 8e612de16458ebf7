//! The served interface `org.gpuquota.Enforcer1.Profile`: which kernels processes launch, and how long they take.
//!
//! Reading what was found needs authorization too: it shows how programs of tenants work.

use std::{sync::Arc, time::Duration};

use zbus::{Connection, interface, message::Header};

use super::{
    Control,
    access::Access,
    leaks::Target,
    manager::{MethodError, Shared, check_strings},
    profile::ProfileReport,
};

/// The served object; one per connection.
pub(super) struct Profiler {
    pub(super) shared: Arc<Shared>,
    pub(super) access: Access,
}

impl Profiler {
    async fn ask<T: Send + 'static>(
        &self,
        connection: &Connection,
        header: &Header<'_>,
        target: String,
        call: impl FnOnce(&dyn Control, Target) -> T + Send + 'static,
    ) -> Result<T, MethodError> {
        check_strings([target.as_str()])?;
        self.shared
            .authorize(
                self.access,
                connection,
                header,
                "look into processes that use GPUs",
            )
            .await?;
        self.shared
            .call(move |control| call(control, Target::parse(&target)))
            .await
    }
}

fn json(report: &ProfileReport) -> Result<String, MethodError> {
    serde_json::to_string(report).map_err(|error| MethodError::failed(error.to_string()))
}

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
        let limit = Duration::from_micros(limit_usec);
        self.ask(connection, &header, target, move |control, target| {
            control.start_profile(target, limit)
        })
        .await??;
        Ok(())
    }

    /// What was found so far, as JSON.
    #[zbus(out_args("json"))]
    async fn get_profile(
        &self,
        target: String,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<String, MethodError> {
        let report = self
            .ask(connection, &header, target, |control, target| {
                control.profile(&target)
            })
            .await??;
        json(&report)
    }

    /// Removes the probes, and tells what was found.
    #[zbus(out_args("json"))]
    async fn stop_profile(
        &self,
        target: String,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<String, MethodError> {
        let report = self
            .ask(connection, &header, target, |control, target| {
                control.stop_profile(&target)
            })
            .await??;
        json(&report)
    }

    /// Whose launches are or were profiled.
    #[zbus(out_args("targets"))]
    async fn list_profiles(&self) -> Result<Vec<String>, MethodError> {
        let targets = self.shared.call(Control::profile_targets).await?;
        Ok(targets.iter().map(ToString::to_string).collect())
    }
}
