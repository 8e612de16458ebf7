//! `nvidia-uvm`: address ranges, references on RM memory, and managed memory that moves.
//!
//! The model does not map managed memory: a file system in user space cannot. `libcuda` takes host memory
//! for it and tells the model of the range by the side channel.

use std::collections::BTreeMap;

use gpuquota_common::nvidia::{status, uvm, uvm_args};

use super::object::Kind;
use super::vidmem::{BlockId, VideoMemory};
use super::{Caller, Fault, Node, RmStatus, Sim};
use crate::bytes::{put_u32, u32_at, u64_at};

/// Nanoseconds that one MiB takes from the card to the host: 4 GiB took 1.09 s.
const TO_HOST_NS_PER_MIB: u64 = 266_000;
/// Nanoseconds that one MiB takes from the host to the card: 4 GiB took 0.514 s.
const TO_GPU_NS_PER_MIB: u64 = 125_000;

/// Ranges are whole pages.
const PAGE: u64 = 4096;

/// The address space of one open `nvidia-uvm` file.
#[derive(Debug, Default)]
pub(super) struct Space {
    /// The process that initialised it.
    pid: Option<u32>,
    /// Ranges by first address, with their lengths.
    ranges: BTreeMap<u64, u64>,
    /// Memory mapped into them, by first address.
    maps: BTreeMap<u64, Vec<BlockId>>,
}

impl Space {
    /// Gives all references back.
    pub(super) fn release(self, memory: &mut VideoMemory) {
        for block in self.maps.into_values().flatten() {
            memory.release(block);
        }
        if let Some(pid) = self.pid {
            memory.destroy_all_managed(pid);
        }
    }

    /// Takes the mappings that begin in an address range out.
    fn unmap(&mut self, base: u64, length: u64) -> Vec<BlockId> {
        let stop = base.saturating_add(length.max(1));
        let hit: Vec<u64> = self.maps.range(base..stop).map(|(at, _)| *at).collect();
        hit.iter()
            .filter_map(|at| self.maps.remove(at))
            .flatten()
            .collect()
    }
}

/// Bytes of a command's structure that the model reads, and where its status is.
const fn layout(cmd: u32) -> Option<(usize, usize)> {
    Some(match cmd {
        uvm::INITIALIZE => (16, uvm_args::INITIALIZE_STATUS),
        uvm::MM_INITIALIZE => (8, uvm_args::MM_INITIALIZE_STATUS),
        uvm::MAP_EXTERNAL_ALLOCATION => {
            (uvm_args::MAP_EXTERNAL_SIZE, uvm_args::MAP_EXTERNAL_STATUS)
        }
        uvm::FREE | uvm::CREATE_EXTERNAL_RANGE => (24, uvm_args::RANGE_STATUS),
        uvm::UNMAP_EXTERNAL => (40, uvm_args::UNMAP_EXTERNAL_STATUS),
        uvm::REGISTER_GPU => (40, uvm_args::REGISTER_GPU_STATUS),
        uvm::REGISTER_GPU_VASPACE => (32, 28),
        uvm::REGISTER_CHANNEL => (56, 48),
        uvm::MIGRATE => (uvm_args::MIGRATE_SIZE, uvm_args::MIGRATE_STATUS),
        _ => return None,
    })
}

/// Commands that the driver knows and that change nothing here.
const fn is_accepted(cmd: u32) -> bool {
    matches!(cmd, 23..=31 | 38..=47 | 53..=79 | 0x3000_0002)
}

impl Sim {
    /// How long a command takes beyond the usual, nanoseconds.
    pub fn uvm_duration(&self, file: u64, cmd: u32, argument: u64, caller: &dyn Caller) -> u64 {
        if cmd != uvm::MIGRATE {
            return 0;
        }
        let mut arg = [0; uvm_args::MIGRATE_SIZE];
        let pid = self.files.get(&file).and_then(|open| open.uvm.pid);
        let (Ok(()), Some(pid)) = (caller.read(argument, &mut arg), pid) else {
            return 0;
        };
        let base = u64_at(&arg, uvm_args::BASE);
        let length = u64_at(&arg, uvm_args::LENGTH);
        let mib = self.memory.managed_length(pid, base, length) >> 20;
        let to_host = arg[uvm_args::MIGRATE_UUID..][..16] == uvm_args::CPU_UUID;
        mib * if to_host {
            TO_HOST_NS_PER_MIB
        } else {
            TO_GPU_NS_PER_MIB
        }
    }

    /// Answers a command of `nvidia-uvm`, whose structure is at `argument` in the caller's memory.
    ///
    /// # Errors
    /// The errno that the call fails with.
    pub fn uvm(
        &mut self,
        file: u64,
        cmd: u32,
        argument: u64,
        caller: &dyn Caller,
    ) -> Result<(), i32> {
        self.count_call(Node::Uvm, cmd);
        let Some((size, status_at)) = layout(cmd) else {
            return if is_accepted(cmd) {
                Ok(())
            } else {
                Err(libc::ENOSYS)
            };
        };
        let mut arg = vec![0; size];
        caller
            .read(argument, &mut arg)
            .map_err(|Fault| libc::EFAULT)?;
        let result = self.uvm_command(file, cmd, &mut arg, caller);
        put_u32(&mut arg, status_at, result.err().unwrap_or(status::OK));
        caller.write(argument, &arg).map_err(|Fault| libc::EFAULT)
    }

    fn uvm_command(
        &mut self,
        file: u64,
        cmd: u32,
        arg: &mut [u8],
        caller: &dyn Caller,
    ) -> Result<(), RmStatus> {
        let base = u64_at(arg, uvm_args::BASE);
        let length = u64_at(arg, uvm_args::LENGTH);
        let open = self.files.get_mut(&file).ok_or(status::INVALID_STATE)?;
        match cmd {
            uvm::INITIALIZE => {
                if open.uvm.pid.is_some_and(|pid| pid != caller.pid()) {
                    return Err(status::INVALID_ARGUMENT);
                }
                open.uvm.pid = Some(caller.pid());
                return Ok(());
            }
            // It is given on a second fd, which stays without an address space.
            uvm::MM_INITIALIZE => return Ok(()),
            _ => {}
        }
        let Some(pid) = open.uvm.pid else {
            return Err(status::ILLEGAL_ACTION);
        };
        match cmd {
            uvm::CREATE_EXTERNAL_RANGE => {
                if length == 0 || !base.is_multiple_of(PAGE) || !length.is_multiple_of(PAGE) {
                    return Err(status::INVALID_ADDRESS);
                }
                open.uvm.ranges.insert(base, length);
                Ok(())
            }
            uvm::MAP_EXTERNAL_ALLOCATION => {
                let client = u32_at(arg, uvm_args::MAP_EXTERNAL_CLIENT);
                let object = u32_at(arg, uvm_args::MAP_EXTERNAL_MEMORY);
                self.map_external(file, base, length, client, object)
            }
            uvm::UNMAP_EXTERNAL => {
                for block in open.uvm.unmap(base, length) {
                    self.memory.release(block);
                }
                Ok(())
            }
            uvm::FREE => {
                let length = open
                    .uvm
                    .ranges
                    .remove(&base)
                    .ok_or(status::INVALID_ADDRESS)?;
                for block in open.uvm.unmap(base, length) {
                    self.memory.release(block);
                }
                Ok(())
            }
            uvm::REGISTER_GPU => {
                let uuid = &arg[uvm_args::REGISTER_GPU_UUID..][..16];
                if self.config.gpus.iter().any(|gpu| gpu.uuid == uuid) {
                    Ok(())
                } else {
                    Err(status::INVALID_ARGUMENT)
                }
            }
            uvm::MIGRATE => {
                let uuid = &arg[uvm_args::MIGRATE_UUID..][..16];
                let to_host = uuid == uvm_args::CPU_UUID;
                let gpu = self.config.gpus.iter().position(|gpu| gpu.uuid == uuid);
                if !to_host && gpu.is_none() {
                    return Err(status::INVALID_DEVICE);
                }
                if self.memory.managed_length(pid, base, length) == 0 {
                    return Err(status::INVALID_ADDRESS);
                }
                let Some(gpu) = gpu else {
                    self.memory.migrate_to_host(pid, base, length);
                    return Ok(());
                };
                self.memory.migrate_to_gpu(pid, base, length, gpu);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn map_external(
        &mut self,
        file: u64,
        base: u64,
        length: u64,
        client: u32,
        object: u32,
    ) -> Result<(), RmStatus> {
        let object = self
            .clients
            .get(&client)
            .ok_or(status::INVALID_CLIENT)?
            .get(object)
            .ok_or(status::OBJECT_NOT_FOUND)?;
        let block = match object.kind {
            Kind::Memory { block } => Some(block),
            Kind::HostMemory { .. } => None,
            _ => return Err(status::INVALID_ARGUMENT),
        };
        let open = self.files.get_mut(&file).ok_or(status::INVALID_STATE)?;
        let end = base.checked_add(length).ok_or(status::INVALID_ADDRESS)?;
        let inside = open
            .uvm
            .ranges
            .range(..=base)
            .next_back()
            .is_some_and(|(start, size)| end <= start.saturating_add(*size));
        if !inside {
            return Err(status::INVALID_ADDRESS);
        }
        if let Some(block) = block {
            open.uvm.maps.entry(base).or_default().push(block);
            self.memory.refer(block);
        }
        Ok(())
    }
}
