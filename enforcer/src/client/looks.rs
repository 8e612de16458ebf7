//! Looks into processes for a while: allocations, launches, threads. They have one shape, and so have their interfaces.

use std::time::Duration;

use serde::de::DeserializeOwned;
use zbus::{
    Proxy,
    proxy::{self, MethodFlags},
};

use super::{CHANGE_TIMEOUT, Client, ClientError, READ_TIMEOUT, micros, protocol};
use crate::control::{
    idle::IdleReport,
    leaks::{LeakReport, Target},
    profile::ProfileReport,
    wire,
};

/// A kind of look, and how the bus calls it.
pub trait Kind {
    /// What it finds.
    type Report: DeserializeOwned;
    /// The interface.
    const INTERFACE: &'static str;
    /// Begins to look at a target for so many microseconds.
    const START: &'static str;
    /// What was found so far.
    const GET: &'static str;
    /// Ends the look, and tells what was found.
    const STOP: &'static str;
    /// Whom is or was looked at.
    const LIST: &'static str;
}

/// Allocations that are not given back.
#[derive(Clone, Copy, Debug)]
pub struct Leaks;

impl Kind for Leaks {
    type Report = LeakReport;
    const INTERFACE: &'static str = "org.gpuquota.Enforcer1.Leaks";
    const START: &'static str = "StartLeaks";
    const GET: &'static str = "GetLeaks";
    const STOP: &'static str = "StopLeaks";
    const LIST: &'static str = "ListLeaks";
}

/// Kernels that are launched.
#[derive(Clone, Copy, Debug)]
pub struct Profile;

impl Kind for Profile {
    type Report = ProfileReport;
    const INTERFACE: &'static str = "org.gpuquota.Enforcer1.Profile";
    const START: &'static str = "StartProfile";
    const GET: &'static str = "GetProfile";
    const STOP: &'static str = "StopProfile";
    const LIST: &'static str = "ListProfiles";
}

/// What threads do while a GPU is idle.
#[derive(Clone, Copy, Debug)]
pub struct Idle;

impl Kind for Idle {
    type Report = IdleReport;
    const INTERFACE: &'static str = "org.gpuquota.Enforcer1.Idle";
    const START: &'static str = "StartIdle";
    const GET: &'static str = "GetIdle";
    const STOP: &'static str = "StopIdle";
    const LIST: &'static str = "ListIdle";
}

impl Client {
    async fn look_proxy<K: Kind>(&self) -> Result<Proxy<'static>, ClientError> {
        let proxy = async {
            proxy::Builder::new(&self.connection)
                .destination(wire::NAME)?
                .path(wire::PATH)?
                .interface(K::INTERFACE)?
                .cache_properties(proxy::CacheProperties::No)
                .build()
                .await
        };
        self.call(READ_TIMEOUT, proxy).await
    }

    /// Begins to look at a tenant or process, for so long at most.
    pub async fn start_look<K: Kind>(
        &self,
        target: &Target,
        limit: Duration,
    ) -> Result<(), ClientError> {
        let (proxy, target) = (self.look_proxy::<K>().await?, target.to_string());
        let arguments = (target.as_str(), micros(limit));
        // Somebody may be asked for a password.
        let flags = MethodFlags::AllowInteractiveAuth.into();
        let call = proxy.call_with_flags::<_, _, ()>(K::START, flags, &arguments);
        self.call(CHANGE_TIMEOUT, call).await.map(|_| ())
    }

    /// What was found so far.
    pub async fn look<K: Kind>(&self, target: &Target) -> Result<K::Report, ClientError> {
        self.look_report::<K>(K::GET, target).await
    }

    /// Ends a look, and tells what was found.
    pub async fn stop_look<K: Kind>(&self, target: &Target) -> Result<K::Report, ClientError> {
        self.look_report::<K>(K::STOP, target).await
    }

    async fn look_report<K: Kind>(
        &self,
        method: &'static str,
        target: &Target,
    ) -> Result<K::Report, ClientError> {
        let (proxy, target) = (self.look_proxy::<K>().await?, target.to_string());
        let flags = MethodFlags::AllowInteractiveAuth.into();
        let call = proxy.call_with_flags::<_, _, String>(method, flags, &target);
        let json = self.call(CHANGE_TIMEOUT, call).await?;
        serde_json::from_str(&json.unwrap_or_default()).map_err(protocol)
    }

    /// Whom is or was looked at.
    pub async fn look_targets<K: Kind>(&self) -> Result<Vec<Target>, ClientError> {
        let proxy = self.look_proxy::<K>().await?;
        let targets: Vec<String> = self.call(READ_TIMEOUT, proxy.call(K::LIST, &())).await?;
        Ok(targets.iter().map(|target| Target::parse(target)).collect())
    }
}
