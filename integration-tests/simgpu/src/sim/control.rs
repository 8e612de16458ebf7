//! `RM_CONTROL`: the commands that matter. The others that libcuda gives are accepted and change nothing.

use gpuquota_common::nvidia::{
    ctrl, disable_channels, fb_info, gid_info, handle_info, nvos54, status, surface_info,
};

use super::object::Kind;
use super::{Caller, Fault, RmStatus, Sim, gpu_id};
use crate::bytes::{put, put_u32, put_u64, u32_at, u64_at};

/// Flag: the parameters are serialised.
const FLAGS_FINN: u32 = 1 << 2;
/// Commands that libcuda gives in the recordings and that have no meaning here.
const ACCEPTED: [u32; 58] = [
    0x101,
    0x13a,
    0x1f0,
    0x215,
    0x27b,
    0x288,
    0xa04,
    0xd01,
    0xd04,
    0x80_0280,
    0x80_0289,
    0x80_0292,
    0x80_1307,
    0x80_1402,
    0x80_170d,
    0x80_1909,
    0x2080_0102,
    0x2080_0111,
    0x2080_0119,
    0x2080_012f,
    0x2080_0131,
    0x2080_0145,
    0x2080_0170,
    0x2080_0195,
    0x2080_01a3,
    0x2080_1201,
    0x2080_1210,
    0x2080_1218,
    0x2080_121b,
    0x2080_1227,
    0x2080_122a,
    0x2080_122b,
    0x2080_1230,
    0x2080_1701,
    0x2080_1801,
    0x2080_1803,
    0x2080_1823,
    0x2080_182a,
    0x2080_182b,
    0x2080_200a,
    0x2080_220c,
    0x2080_2210,
    0x2080_2a0a,
    0x2080_3002,
    0x2080_3601,
    0x2080_3801,
    0x2080_8159,
    0x2080_8162,
    0x2080_9038,
    0x2081_0108,
    0x503c_0102,
    0x503c_0104,
    0x503c_0105,
    0x83de_0309,
    0x906f_0101,
    0x90e6_0102,
    0xc36f_0108,
    0xcb33_0101,
];
/// An entry of an id list that names no GPU.
const NO_GPU: u32 = 0xffff_ffff;
const IDS: usize = 32;
/// Older form of [`ctrl::GPU_GET_ID_INFO_V2`], with a pointer to a name behind the same first fields.
const GPU_GET_ID_INFO: u32 = 0x202;
/// Size of `NVA06C_CTRL_GPFIFO_SCHEDULE_PARAMS` from 575.51.02 on.
const SCHEDULE_SIZE: usize = 3;
const PREEMPT_SIZE: usize = 8;
const FB_INFO_SIZE: usize = fb_info::LIST + 8 * fb_info::MAX_PAIRS;
/// `NV2080_CTRL_GPU_GET_NAME_STRING_PARAMS`.
const NAME_SIZE: usize = 68;
const PREEMPT_MAX_US: u32 = 1_000_000;

impl Sim {
    /// Answers `RM_CONTROL`.
    pub(super) fn rm_control(&mut self, file: u64, arg: &mut [u8], caller: &dyn Caller) {
        let result = self.control(file, arg, caller);
        put_u32(arg, nvos54::STATUS, result.err().unwrap_or(status::OK));
    }

    fn control(&mut self, file: u64, arg: &[u8], caller: &dyn Caller) -> Result<(), RmStatus> {
        let client_handle = u32_at(arg, nvos54::CLIENT);
        let object = u32_at(arg, nvos54::OBJECT);
        let cmd = u32_at(arg, nvos54::CMD);
        let params = Params {
            caller,
            address: u64_at(arg, nvos54::PARAMS),
            size: u32_at(arg, nvos54::PARAMS_SIZE) as usize,
        };
        let client = self.client(file, client_handle)?;
        let kind = match client.get(object) {
            Some(object) => Some(object.kind.clone()),
            None if object == client_handle => None,
            None => return Err(status::OBJECT_NOT_FOUND),
        };
        if u32_at(arg, nvos54::FLAGS) & FLAGS_FINN != 0 {
            return Err(status::INVALID_ARGUMENT);
        }
        match (cmd, kind) {
            (ctrl::GPU_GET_ATTACHED_IDS, None) => {
                let mut ids = [0; IDS * 4];
                self.fill_ids(&mut ids);
                params.write(&ids)
            }
            (ctrl::GPU_GET_PROBED_IDS, None) => {
                let mut ids = [0xff; 2 * IDS * 4];
                self.fill_ids(&mut ids[..IDS * 4]);
                params.write(&ids)
            }
            (ctrl::GPU_GET_ID_INFO_V2 | GPU_GET_ID_INFO, None) => self.id_info(cmd, &params),
            (ctrl::CLIENT_GET_HANDLE_INFO, None) => self.handle_info(file, client_handle, &params),
            (ctrl::MEMORY_GET_SURFACE_INFO, Some(Kind::Memory { block })) => {
                let (_, bytes) = self.memory.block(block).unwrap_or_default();
                surface_info(bytes, &params)
            }
            (
                ctrl::MEMORY_GET_SURFACE_INFO,
                Some(Kind::HostMemory { bytes } | Kind::Window { bytes }),
            ) => surface_info(bytes, &params),
            (ctrl::FB_GET_INFO_V2, Some(Kind::Subdevice { gpu })) => self.fb_info(gpu, &params),
            (ctrl::GPU_GET_GID_INFO, Some(Kind::Subdevice { gpu })) => self.gid_info(gpu, &params),
            (ctrl::GPU_GET_NAME_STRING, Some(Kind::Subdevice { gpu })) => {
                self.name_string(gpu, &params)
            }
            (ctrl::FIFO_DISABLE_CHANNELS, Some(Kind::Subdevice { .. })) => {
                self.disable_channels(&params)
            }
            (cmd, Some(Kind::Group { gpu, .. })) => {
                self.group_control(gpu, (client_handle, object), cmd, &params)
            }
            (cmd, _) if ACCEPTED.contains(&cmd) => Ok(()),
            _ => Err(status::NOT_SUPPORTED),
        }
    }

    fn group_control(
        &mut self,
        gpu: usize,
        group: (u32, u32),
        cmd: u32,
        params: &Params<'_>,
    ) -> Result<(), RmStatus> {
        let scheduler = &mut self.schedulers[gpu];
        match cmd {
            ctrl::TSG_SET_TIMESLICE => {
                // Any number is accepted, also 0.
                let slice = u64::from_ne_bytes(params.read::<8>()?);
                scheduler.set_slice_us(group, slice);
                Ok(())
            }
            ctrl::TSG_GET_TIMESLICE => {
                params.expect(8)?;
                let slice = scheduler.slice_us(group).unwrap_or_default();
                params.write(&slice.to_ne_bytes())
            }
            ctrl::TSG_PREEMPT => {
                let buf = params.read::<PREEMPT_SIZE>()?;
                if buf[1] != 0 && u32_at(&buf, 4) > PREEMPT_MAX_US {
                    return Err(status::INVALID_ARGUMENT);
                }
                scheduler.preempt(group);
                Ok(())
            }
            // With parameters of the right length it is accepted; stopping a group with it had no effect.
            ctrl::TSG_GPFIFO_SCHEDULE => params.expect(SCHEDULE_SIZE),
            ctrl::TSG_SET_INTERLEAVE_LEVEL => {
                let level = u32::from_ne_bytes(params.read::<4>()?);
                if !params.caller.may_nice() {
                    return Err(status::INSUFFICIENT_PERMISSIONS);
                }
                if level > 2 {
                    return Err(status::NOT_SUPPORTED);
                }
                // Accepted, and no effect was seen on the recorded card.
                if let Some(object) = self
                    .clients
                    .get_mut(&group.0)
                    .and_then(|client| client.get_mut(group.1))
                {
                    object.kind = Kind::Group {
                        gpu,
                        interleave: level,
                    };
                }
                Ok(())
            }
            ctrl::TSG_GET_INTERLEAVE_LEVEL => {
                params.expect(4)?;
                let level = match self
                    .clients
                    .get(&group.0)
                    .and_then(|client| client.get(group.1))
                    .map(|object| &object.kind)
                {
                    Some(Kind::Group { interleave, .. }) => *interleave,
                    _ => 0,
                };
                params.write(&level.to_ne_bytes())
            }
            _ => Err(status::NOT_SUPPORTED),
        }
    }

    fn fill_ids(&self, ids: &mut [u8]) {
        for index in 0..ids.len() / 4 {
            let id = if index < self.config.gpus.len() {
                gpu_id(index)
            } else {
                NO_GPU
            };
            put_u32(ids, index * 4, id);
        }
    }

    fn id_info(&self, cmd: u32, params: &Params<'_>) -> Result<(), RmStatus> {
        let mut buf = params.read_prefix::<32>()?;
        let wanted = u32_at(&buf, 0);
        let index = (0..self.config.gpus.len())
            .find(|index| gpu_id(*index) == wanted)
            .and_then(|index| u32::try_from(index).ok())
            .ok_or(status::INVALID_ARGUMENT)?;
        put_u32(&mut buf, 4, 0);
        put_u32(&mut buf, 8, index);
        put_u32(&mut buf, 12, 0);
        if cmd == ctrl::GPU_GET_ID_INFO_V2 {
            put_u32(&mut buf, 16, 0);
            put_u32(&mut buf, 20, wanted);
            put_u32(&mut buf, 24, index);
            put_u32(&mut buf, 28, u32::MAX);
            params.write(&buf)
        } else {
            params.write(&buf[..16])
        }
    }

    fn handle_info(
        &mut self,
        file: u64,
        client_handle: u32,
        params: &Params<'_>,
    ) -> Result<(), RmStatus> {
        let mut buf = params.read::<{ handle_info::SIZE }>()?;
        let handle = u32_at(&buf, handle_info::OBJECT);
        let index = u32_at(&buf, handle_info::INDEX);
        let client = self.client(file, client_handle)?;
        let (parent, class) = match client.get(handle) {
            Some(object) => (object.parent, object.class),
            None if handle == client_handle => {
                (0, gpuquota_common::nvidia::class::NV01_ROOT_CLIENT)
            }
            None => return Err(status::OBJECT_NOT_FOUND),
        };
        let answer = match index {
            handle_info::INDEX_PARENT => parent,
            handle_info::INDEX_CLASS => class,
            _ => return Err(status::INVALID_ARGUMENT),
        };
        put_u64(&mut buf, handle_info::DATA, answer.into());
        params.write(&buf)
    }

    fn fb_info(&self, gpu: usize, params: &Params<'_>) -> Result<(), RmStatus> {
        let mut list = params.read::<FB_INFO_SIZE>()?;
        let count = u32_at(&list, fb_info::COUNT) as usize;
        if count > fb_info::MAX_PAIRS {
            return Err(status::INVALID_ARGUMENT);
        }
        let card = self.memory.card(gpu);
        let free = card.capacity.saturating_sub(card.used);
        for pair in 0..count {
            let at = fb_info::LIST + 8 * pair;
            let bytes = match u32_at(&list, at) {
                fb_info::INDEX_RAM_SIZE
                | fb_info::INDEX_TOTAL_RAM_SIZE
                | fb_info::INDEX_HEAP_SIZE
                | fb_info::INDEX_USABLE_RAM_SIZE => card.capacity,
                fb_info::INDEX_HEAP_FREE => free,
                _ => 0,
            };
            let kib = u32::try_from(bytes >> 10).unwrap_or(u32::MAX);
            put_u32(&mut list, at + 4, kib);
        }
        params.write(&list)
    }

    fn gid_info(&self, gpu: usize, params: &Params<'_>) -> Result<(), RmStatus> {
        let mut buf = params.read_prefix::<{ gid_info::SIZE }>()?;
        let card = &self.config.gpus[gpu];
        let answer = if u32_at(&buf, gid_info::FLAGS) & 3 == gid_info::FLAGS_BINARY {
            card.uuid.to_vec()
        } else {
            let mut text = card.uuid_text().into_bytes();
            text.push(0);
            text
        };
        let length = u32::try_from(answer.len()).unwrap_or_default();
        put_u32(&mut buf, gid_info::LENGTH, length);
        put(&mut buf, gid_info::DATA, &answer);
        params.write(&buf)
    }

    fn name_string(&self, gpu: usize, params: &Params<'_>) -> Result<(), RmStatus> {
        let mut buf = params.read_prefix::<NAME_SIZE>()?;
        let name = self.config.gpus[gpu].name.as_bytes();
        let text = &mut buf[4..];
        text.fill(0);
        let length = name.len().min(text.len() - 1);
        text[..length].copy_from_slice(&name[..length]);
        params.write(&buf)
    }

    fn disable_channels(&mut self, params: &Params<'_>) -> Result<(), RmStatus> {
        let buf = params.read::<{ disable_channels::SIZE }>()?;
        let disable = buf[disable_channels::DISABLE] != 0;
        let count = u32_at(&buf, disable_channels::COUNT) as usize;
        if u64_at(&buf, disable_channels::EVENT) != 0 {
            return Err(status::INSUFFICIENT_PERMISSIONS);
        }
        if count == 0 || count > disable_channels::MAX {
            return Err(status::INVALID_PARAM_STRUCT);
        }
        let mut found = Vec::with_capacity(count);
        for index in 0..count {
            // Measured: the clients in the list are not held against the caller's file.
            let client = u32_at(&buf, disable_channels::CLIENTS + 4 * index);
            let channel = u32_at(&buf, disable_channels::CHANNELS + 4 * index);
            let (gpu, group) = self
                .channel(client, channel)
                .ok_or(status::INVALID_CHANNEL)?;
            found.push((gpu, group, channel));
        }
        for (gpu, group, channel) in found {
            self.schedulers[gpu].set_disabled(group, channel, disable);
        }
        Ok(())
    }
}

fn surface_info(bytes: u64, params: &Params<'_>) -> Result<(), RmStatus> {
    let buf = params.read::<{ surface_info::SIZE }>()?;
    let count = u32_at(&buf, surface_info::COUNT) as usize;
    let list = Params {
        caller: params.caller,
        address: u64_at(&buf, surface_info::LIST),
        size: count * 8,
    };
    if count > 64 {
        return Err(status::INVALID_ARGUMENT);
    }
    let mut pairs = list.read_up_to(count * 8)?;
    for pair in 0..count {
        if u32_at(&pairs, pair * 8) == surface_info::INDEX_PHYS_SIZE {
            let units = u32::try_from(bytes >> 12).unwrap_or(u32::MAX);
            put_u32(&mut pairs, pair * 8 + 4, units);
        }
    }
    list.write(&pairs)
}

/// The parameters of a control in the caller's memory.
struct Params<'a> {
    caller: &'a dyn Caller,
    address: u64,
    size: usize,
}

impl Params<'_> {
    fn expect(&self, size: usize) -> Result<(), RmStatus> {
        if self.size == size {
            Ok(())
        } else {
            Err(status::INVALID_ARGUMENT)
        }
    }

    /// Parameters that have exactly `N` bytes.
    fn read<const N: usize>(&self) -> Result<[u8; N], RmStatus> {
        self.expect(N)?;
        self.read_prefix()
    }

    /// The first `N` bytes of parameters that have at least as many.
    fn read_prefix<const N: usize>(&self) -> Result<[u8; N], RmStatus> {
        if self.size < N {
            return Err(status::INVALID_ARGUMENT);
        }
        let mut buf = [0; N];
        self.caller
            .read(self.address, &mut buf)
            .map_err(|Fault| status::INVALID_ADDRESS)?;
        Ok(buf)
    }

    /// All parameters, `most` bytes of them.
    fn read_up_to(&self, most: usize) -> Result<Vec<u8>, RmStatus> {
        let mut buf = vec![0; self.size.min(most)];
        self.caller
            .read(self.address, &mut buf)
            .map_err(|Fault| status::INVALID_ADDRESS)?;
        Ok(buf)
    }

    fn write(&self, bytes: &[u8]) -> Result<(), RmStatus> {
        if self.size < bytes.len() {
            return Err(status::INVALID_ARGUMENT);
        }
        self.caller
            .write(self.address, bytes)
            .map_err(|Fault| status::INVALID_ADDRESS)
    }
}
