//! A policy as text.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::gpu::GpuSelector;
use crate::limits::Limits;
use crate::name::{toml_key, toml_string};
use crate::policy::Policy;

impl Policy {
    /// The merged policy as one policy file. Reading it gives an equal policy.
    pub fn to_toml(&self) -> String {
        let mut out = String::new();
        for class in self.classes.values() {
            let table = format!("class.{}", toml_key(&class.name));
            header(&mut out, &table);
            if let Some(priority) = &class.priority {
                line(&mut out, "priority", &priority.value.to_string());
            }
            if let Some(exclusive) = &class.exclusive {
                line(&mut out, "exclusive", &exclusive.value.to_string());
            }
            limits(&mut out, &class.limits);
            gpus(&mut out, &table, &class.gpu);
        }
        for tenant in self.tenants.values() {
            let table = format!("tenant.{}", toml_key(&tenant.name));
            header(&mut out, &table);
            line(
                &mut out,
                "cgroup",
                &toml_string(tenant.cgroup.value.as_str()),
            );
            if let Some(class) = &tenant.class {
                line(&mut out, "class", &toml_string(&class.value));
            }
            limits(&mut out, &tenant.limits);
            gpus(&mut out, &table, &tenant.gpu);
        }
        out
    }
}

fn gpus(out: &mut String, table: &str, gpus: &BTreeMap<GpuSelector, Box<Limits>>) {
    for (selector, of_gpu) in gpus {
        header(
            out,
            &format!("{table}.gpu.{}", toml_string(&selector.to_string())),
        );
        limits(out, of_gpu);
    }
}

fn header(out: &mut String, table: &str) {
    if !out.is_empty() {
        out.push('\n');
    }
    let _ = writeln!(out, "[{table}]");
}

fn line(out: &mut String, key: &str, value: &str) {
    let _ = writeln!(out, "{key} = {value}");
}

fn limits(out: &mut String, limits: &Limits) {
    for (key, value, _) in limits.iter() {
        line(out, key.name(), &value);
    }
}
