//! The calls that were answered, written to a file in the form of the recordings in `traces/`.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::sync::{Mutex, PoisonError};

use gpuquota_common::nvidia::{
    IoctlCmd, class, memparams, nr, nvos00, nvos02, nvos54, nvos64, status_offset,
};

use crate::bytes::{u32_at, u64_at};
use crate::sim::{Caller, Node};

/// Where the calls go.
pub struct Trace(Mutex<File>);

impl Trace {
    /// Writes to `file`.
    pub fn new(file: File) -> Self {
        Self(Mutex::new(file))
    }

    /// Writes a line.
    pub fn line(&self, line: &str) {
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A full disk must not stop the server.
        let _ = file.write_all(format!("{line}\n").as_bytes());
    }
}

/// What a call asks for.
pub fn describe(node: Node, cmd: IoctlCmd, arg: &[u8], caller: &dyn Caller) -> String {
    let mut line = format!("/dev/{} nr={:#x} sz={} ", node.name(), cmd.nr, cmd.size);
    let rest = match cmd.nr {
        nr::RM_ALLOC => {
            let class_number = u32_at(arg, nvos64::CLASS);
            let mut rest = format!(
                "cls={class_number:#x} root={:x} parent={:x} new={:x}",
                u32_at(arg, nvos64::ROOT),
                u32_at(arg, nvos64::PARENT),
                u32_at(arg, nvos64::NEW)
            );
            let mut params = [0; memparams::MIN_SIZE];
            let is_memory = matches!(
                class_number,
                class::NV01_MEMORY_LOCAL_USER
                    | class::NV01_MEMORY_SYSTEM
                    | class::NV50_MEMORY_VIRTUAL
            );
            if is_memory
                && caller
                    .read(u64_at(arg, nvos64::PARAMS), &mut params)
                    .is_ok()
            {
                // Writing to a string does not fail.
                let _ = write!(
                    rest,
                    " type={:x} flags={:x} attr={:x} attr2={:x} size={}",
                    u32_at(&params, 4),
                    u32_at(&params, memparams::FLAGS),
                    u32_at(&params, memparams::ATTR),
                    u32_at(&params, memparams::ATTR2),
                    u64_at(&params, memparams::REQUESTED)
                );
            }
            rest
        }
        nr::RM_FREE => format!(
            "FREE root={:x} parent={:x} obj={:x}",
            u32_at(arg, nvos00::ROOT),
            u32_at(arg, nvos00::PARENT),
            u32_at(arg, nvos00::OBJECT)
        ),
        nr::RM_CONTROL => format!(
            "CTRL cmd={:#x} obj={:x}",
            u32_at(arg, nvos54::CMD),
            u32_at(arg, nvos54::OBJECT)
        ),
        nr::RM_ALLOC_MEMORY => format!(
            "ALLOCMEM cls={:#x} parent={:x} new={:x} size={}",
            u32_at(arg, nvos02::CLASS),
            u32_at(arg, nvos02::PARENT),
            u32_at(arg, nvos02::NEW),
            u64_at(arg, nvos02::LIMIT).wrapping_add(1)
        ),
        _ => String::new(),
    };
    line += &rest;
    line
}

/// What came of it.
pub fn outcome(cmd: IoctlCmd, arg: &[u8], result: Result<(), i32>) -> String {
    if let Err(errno) = result {
        return format!(" ret=-1 err={errno}");
    }
    let status = status_offset(cmd).map_or(0, |offset| u32_at(arg, offset));
    format!(" ret=0 err=0 st={status:#x}")
}
