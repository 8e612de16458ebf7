//! The served interface `org.gpuquota.Enforcer1.Idle`: what threads do while a GPU is idle.
//!
//! Reading what was found needs authorization too: it shows how programs of tenants work.

use std::{sync::Arc, time::Duration};

use zbus::{Connection, interface, message::Header};

use super::{
    Control,
    access::Access,
    idle::IdleReport,
    leaks::Target,
    manager::{MethodError, Shared, check_strings},
};

/// The served object; one per connection.
pub(super) struct IdleWatch {
    pub(super) shared: Arc<Shared>,
    pub(super) access: Access,
}

impl IdleWatch {
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

fn json(report: &IdleReport) -> Result<String, MethodError> {
    serde_json::to_string(report).map_err(|error| MethodError::failed(error.to_string()))
}

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
        let limit = Duration::from_micros(limit_usec);
        self.ask(connection, &header, target, move |control, target| {
            control.start_idle(target, limit)
        })
        .await??;
        Ok(())
    }

    /// What was found so far, as JSON.
    #[zbus(out_args("json"))]
    async fn get_idle(
        &self,
        target: String,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<String, MethodError> {
        let report = self
            .ask(connection, &header, target, |control, target| {
                control.idle(&target)
            })
            .await??;
        json(&report)
    }

    /// Ends the look, and tells what was found.
    #[zbus(out_args("json"))]
    async fn stop_idle(
        &self,
        target: String,
        #[zbus(connection)] connection: &Connection,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<String, MethodError> {
        let report = self
            .ask(connection, &header, target, |control, target| {
                control.stop_idle(&target)
            })
            .await??;
        json(&report)
    }

    /// Whose threads are or were followed.
    #[zbus(out_args("targets"))]
    async fn list_idle(&self) -> Result<Vec<String>, MethodError> {
        let targets = self.shared.call(Control::idle_targets).await?;
        Ok(targets.iter().map(ToString::to_string).collect())
    }
}
