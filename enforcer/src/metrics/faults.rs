//! Metrics of GPU faults.

use super::{
    GpuSample, TenantSample,
    text::{Exposition, Kind},
};

/// Faults of tenants and of GPUs.
pub(super) fn render(out: &mut Exposition<'_>, gpus: &[GpuSample], tenants: &[TenantSample]) {
    let family = out.family(
        "gpuquota_tenant_faults_total",
        Kind::Counter,
        "GPU faults laid to the tenant since the daemon runs: its process was named (process), or only the GPU is known (gpu).",
    );
    for tenant in tenants {
        for gpu in &tenant.gpus {
            let index = gpu.gpu.to_string();
            for (certainty, count) in [
                ("process", gpu.faults.certain),
                ("gpu", gpu.faults.uncertain),
            ] {
                let labels = [
                    ("tenant", tenant.name.as_str()),
                    ("gpu", &index),
                    ("certainty", certainty),
                ];
                family.labelled(&labels, count);
            }
        }
    }
    let family = out.family(
        "gpuquota_tenant_xids_total",
        Kind::Counter,
        "The same by the driver's error code, from the first of each code on.",
    );
    for tenant in tenants {
        for gpu in &tenant.gpus {
            let index = gpu.gpu.to_string();
            for (xid, count) in &gpu.faults.by_code {
                let labels = [
                    ("tenant", tenant.name.as_str()),
                    ("gpu", &index),
                    ("xid", &code(*xid)),
                ];
                family.labelled(&labels, *count);
            }
        }
    }
    let family = out.family(
        "gpuquota_gpu_xids_total",
        Kind::Counter,
        "GPU faults by the driver's error code since the daemon runs, from the first of each code on.",
    );
    for gpu in gpus {
        let index = gpu.index.to_string();
        for (xid, count) in &gpu.xids {
            family.labelled(&[("gpu", &index), ("xid", &code(*xid))], *count);
        }
    }
}

fn code(xid: u32) -> String {
    match xid {
        0 => "other".to_owned(),
        xid => xid.to_string(),
    }
}
