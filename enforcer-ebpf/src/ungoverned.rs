//! `cgroup/dev` on the root of the hierarchy: the GPUs' device files are closed to processes in no tenant.
//!
//! Programs of one hook are in AND: this one never opens what another closes, and none of theirs is touched. It
//! only says no to somebody who opens a GPU's file; what is open stays open.

use aya_ebpf::{
    helpers::bpf_get_current_ancestor_cgroup_id, macros::cgroup_device, programs::DeviceContext,
};
use gpuquota_common::map::{
    DeviceKey, MAX_CGROUP_LEVEL, NO_TENANT, Settings, counter, settings_flags,
};

use crate::{
    maps::{DEVICES, EXEMPT, count, daemon_alive, settings},
    task,
};

/// `BPF_DEVCG_DEV_CHAR`
const CHARACTER: u32 = 2;
/// `BPF_DEVCG_ACC_READ | BPF_DEVCG_ACC_WRITE`; making a node harms nobody.
const OPENS: u32 = 2 | 4;
/// Major number of every file of the driver but nvidia-uvm's, whose number is in the map of devices.
const NVIDIA_MAJOR: u32 = 195;

const ALLOW: i32 = 1;
const DENY: i32 = 0;

/// Somebody opens or makes a device file (kernel 4.15).
#[cgroup_device]
pub fn ungoverned(ctx: DeviceContext) -> i32 {
    // SAFETY: the context of this program, checked by the verifier.
    let (access, major, minor) = unsafe {
        (
            (*ctx.device).access_type,
            (*ctx.device).major,
            (*ctx.device).minor,
        )
    };
    if access & 0xffff != CHARACTER || (access >> 16) & OPENS == 0 {
        return ALLOW;
    }
    if major != NVIDIA_MAJOR {
        let key = DeviceKey {
            inode: 0,
            dev: major << 20 | minor,
            reserved: 0,
        };
        // SAFETY: entries are only inserted and removed.
        if unsafe { DEVICES.get(key) }.is_none() {
            return ALLOW;
        }
    }
    let settings = settings();
    if settings.flags & settings_flags::DENY_UNGOVERNED == 0
        || settings.flags & settings_flags::OPEN_WITHOUT_DAEMON != 0 && !daemon_alive(&settings)
        || is_known(&settings)
    {
        return ALLOW;
    }
    count(counter::UNGOVERNED_DENIED);
    DENY
}

/// Whether the task is the daemon's, a tenant's, or in a cgroup that is exempt.
#[inline(always)]
fn is_known(settings: &Settings) -> bool {
    if task::tgid() == settings.daemon_tgid || task::tenant(settings, task::cgroup()) != NO_TENANT {
        return true;
    }
    for level in 0..MAX_CGROUP_LEVEL {
        // SAFETY: no effects; 0 for levels below the task's own.
        let id = unsafe { bpf_get_current_ancestor_cgroup_id(level as i32) };
        if id == 0 {
            break;
        }
        // SAFETY: entries are only inserted and removed.
        if unsafe { EXEMPT.get(id) }.is_some() {
            return true;
        }
    }
    false
}
