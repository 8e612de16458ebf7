//! Metrics of what is usual.

use super::{
    TenantSample,
    text::{Exposition, Kind},
};
use crate::baseline::Usual;

/// Medians and deviations of tenants.
pub(super) fn render(out: &mut Exposition<'_>, tenants: &[TenantSample]) {
    let on_gpu = |of: fn(&super::TenantGpuSample) -> Option<Usual>| {
        tenants.iter().flat_map(move |tenant| {
            tenant
                .gpus
                .iter()
                .filter_map(move |gpu| Some((tenant.name.as_str(), gpu.gpu.to_string(), of(gpu)?)))
        })
    };
    let family = out.family(
        "gpuquota_tenant_memory_baseline_bytes",
        Kind::Gauge,
        "Memory charged: median and median absolute deviation (mad) of the last hour; absent in its first ten minutes of use.",
    );
    for (tenant, gpu, usual) in on_gpu(|gpu| gpu.usual_memory) {
        both(family, &[("tenant", tenant), ("gpu", &gpu)], usual);
    }
    let family = out.family(
        "gpuquota_tenant_gpu_time_baseline_ratio",
        Kind::Gauge,
        "Part of the GPU's time: the same.",
    );
    for (tenant, gpu, usual) in on_gpu(|gpu| gpu.usual_time) {
        both(family, &[("tenant", tenant), ("gpu", &gpu)], usual);
    }
    let family = out.family(
        "gpuquota_tenant_launches_baseline_per_second",
        Kind::Gauge,
        "Launches a second: the same, over all GPUs.",
    );
    for tenant in tenants {
        if let Some(usual) = tenant.usual_launches {
            both(family, &[("tenant", &tenant.name)], usual);
        }
    }
}

fn both(family: &mut Exposition<'_>, labels: &[(&str, &str)], usual: Usual) {
    for (stat, value) in [("median", usual.median), ("mad", usual.mad)] {
        let labels: Vec<_> = labels.iter().copied().chain([("stat", stat)]).collect();
        family.labelled(&labels, value);
    }
}
