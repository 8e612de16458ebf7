//! Metrics of the launch profile.

use super::{
    TenantSample,
    text::{Exposition, Kind},
};

/// Anomalies of tenants.
pub(super) fn render(out: &mut Exposition<'_>, tenants: &[TenantSample]) {
    let family = out.family(
        "gpuquota_tenant_anomalies_total",
        Kind::Counter,
        "Kernels that took more than anomaly.factor times as long as usual, by episodes, since the daemon runs; 0 while nobody profiles.",
    );
    for tenant in tenants {
        family.labelled(&[("tenant", tenant.name.as_str())], tenant.anomalies);
    }
}
