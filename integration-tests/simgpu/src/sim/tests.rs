//! The model by itself: a caller whose memory is a map.

use std::cell::RefCell;
use std::collections::BTreeMap;

use gpuquota_common::nvidia::{
    IoctlCmd, card, class, ctrl, disable_channels, handle_info, heap, memparams, nr, nvos00,
    nvos02, nvos32, nvos54, nvos55, nvos64, status, surface_info, uvm, uvm_args, xfer,
};

use super::*;
use crate::bytes::{put, put_u32, put_u64, u32_at, u64_at};

const GIB: u64 = 1 << 30;
const MIB2: u64 = 2 << 20;
const CTL: u64 = 1;
const GPU0: u64 = 2;
const UVM: u64 = 3;
const DEVICE: u32 = 0x5c00_0002;
const SUBDEVICE: u32 = 0x5c00_0003;
const VIDEO: u32 = class::NV01_MEMORY_LOCAL_USER;

/// A process whose memory is whatever the test puts there.
struct Fake {
    pid: u32,
    memory: RefCell<BTreeMap<u64, Vec<u8>>>,
    open: Vec<Node>,
    nice: bool,
}

impl Fake {
    fn new(pid: u32) -> Self {
        Self {
            pid,
            memory: RefCell::default(),
            open: vec![Node::Ctl, Node::Gpu(0), Node::Gpu(1), Node::Uvm],
            nice: false,
        }
    }

    fn place(&self, address: u64, bytes: &[u8]) -> u64 {
        self.memory.borrow_mut().insert(address, bytes.to_vec());
        address
    }

    fn at(&self, address: u64) -> Vec<u8> {
        self.memory.borrow()[&address].clone()
    }
}

impl Caller for Fake {
    fn pid(&self) -> u32 {
        self.pid
    }

    fn read(&self, address: u64, buf: &mut [u8]) -> Result<(), Fault> {
        let memory = self.memory.borrow();
        let bytes = memory
            .get(&address)
            .filter(|bytes| bytes.len() >= buf.len())
            .ok_or(Fault)?;
        buf.copy_from_slice(&bytes[..buf.len()]);
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        let mut memory = self.memory.borrow_mut();
        let place = memory
            .get_mut(&address)
            .filter(|place| place.len() >= bytes.len())
            .ok_or(Fault)?;
        place[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn has_open(&self, node: Node) -> bool {
        self.open.contains(&node)
    }

    fn may_nice(&self) -> bool {
        self.nice
    }
}

/// A model with the files of one process open, and its client with device and subdevice.
struct Rig {
    sim: Sim,
    process: Fake,
    client: u32,
}

impl Rig {
    fn new() -> Self {
        let mut sim = Sim::new(Config {
            gpus: (0..2)
                .map(|index| GpuConfig::numbered(index, 4 * GIB))
                .collect(),
            ..Config::default()
        });
        let process = Fake::new(100);
        sim.open(CTL, Node::Ctl, 100);
        sim.open(GPU0, Node::Gpu(0), 100);
        sim.open(UVM, Node::Uvm, 100);
        let mut rig = Self {
            sim,
            process,
            client: 0,
        };
        let (status, client) = rig.alloc(0, 0, class::NV01_ROOT, 0);
        assert_eq!(status, status::OK);
        rig.client = client;
        assert_eq!(
            rig.alloc(client, DEVICE, class::NV01_DEVICE_0, 0),
            (0, DEVICE)
        );
        let subdevice = rig.alloc(DEVICE, SUBDEVICE, class::NV20_SUBDEVICE_0, 0);
        assert_eq!(subdevice, (0, SUBDEVICE));
        rig
    }

    fn call(&mut self, file: u64, number: u8, arg: &mut [u8]) -> Result<(), i32> {
        let cmd = IoctlCmd {
            nr: number,
            size: u16::try_from(arg.len()).unwrap(),
        };
        self.sim.escape(file, cmd, arg, &self.process)
    }

    fn alloc_by(
        &mut self,
        file: u64,
        parent: u32,
        new: u32,
        class: u32,
        params: u64,
    ) -> (u32, u32) {
        let mut arg = [0; 48];
        put_u32(&mut arg, nvos64::ROOT, self.client);
        put_u32(&mut arg, nvos64::PARENT, parent);
        put_u32(&mut arg, nvos64::NEW, new);
        put_u32(&mut arg, nvos64::CLASS, class);
        put_u64(&mut arg, nvos64::PARAMS, params);
        self.call(file, nr::RM_ALLOC, &mut arg).unwrap();
        (u32_at(&arg, nvos64::STATUS), u32_at(&arg, nvos64::NEW))
    }

    fn alloc(&mut self, parent: u32, new: u32, class: u32, params: u64) -> (u32, u32) {
        self.alloc_by(CTL, parent, new, class, params)
    }

    fn params(&self, size: u64) -> u64 {
        let mut params = [0; 128];
        put_u64(&mut params, memparams::REQUESTED, size);
        self.process.place(0x1000, &params)
    }

    /// Parameters of a channel group on the compute engine.
    fn group_params(&self) -> u64 {
        let mut params = [0; 20];
        put_u32(&mut params, 12, 1);
        self.process.place(0x1800, &params)
    }

    fn memory(&mut self, handle: u32, size: u64) -> u32 {
        let params = self.params(size);
        self.alloc(DEVICE, handle, VIDEO, params).0
    }

    fn free(&mut self, handle: u32) -> u32 {
        let mut arg = [0; 16];
        put_u32(&mut arg, nvos00::ROOT, self.client);
        put_u32(&mut arg, nvos00::OBJECT, handle);
        self.call(CTL, nr::RM_FREE, &mut arg).unwrap();
        u32_at(&arg, nvos00::STATUS)
    }

    fn control(&mut self, object: u32, cmd: u32, params: &mut [u8]) -> u32 {
        let address = self.process.place(0x2000, params);
        let mut arg = [0; 32];
        put_u32(&mut arg, nvos54::CLIENT, self.client);
        put_u32(&mut arg, nvos54::OBJECT, object);
        put_u32(&mut arg, nvos54::CMD, cmd);
        put_u64(&mut arg, nvos54::PARAMS, address);
        put_u32(
            &mut arg,
            nvos54::PARAMS_SIZE,
            u32::try_from(params.len()).unwrap(),
        );
        self.call(CTL, nr::RM_CONTROL, &mut arg).unwrap();
        params.copy_from_slice(&self.process.at(address));
        u32_at(&arg, nvos54::STATUS)
    }

    fn uvm(&mut self, cmd: u32, arg: &mut [u8]) {
        let address = self.process.place(0x3000, arg);
        self.sim.uvm(UVM, cmd, address, &self.process).unwrap();
        arg.copy_from_slice(&self.process.at(address));
    }

    fn used(&self) -> u64 {
        self.sim.memory().card(0).used
    }
}

#[test]
fn only_number_and_size_count_and_the_size_must_be_exact() {
    let mut rig = Rig::new();
    for size in [0, 31, 33, 40, 47, 49] {
        assert_eq!(
            rig.call(CTL, nr::RM_ALLOC, &mut vec![0; size]),
            Err(libc::EINVAL)
        );
    }
    assert_eq!(rig.call(CTL, 0x32, &mut [0; 16]), Err(libc::EINVAL));
    // On the wrong file.
    assert_eq!(rig.call(GPU0, nr::RM_FREE, &mut [0; 16]), Err(libc::EINVAL));
    assert_eq!(
        rig.call(GPU0, nr::RM_ALLOC, &mut [0; 48]),
        Err(libc::EINVAL)
    );
    assert_eq!(
        rig.call(CTL, nr::RM_ALLOC_MEMORY, &mut [0; 56]),
        Err(libc::EINVAL)
    );
}

#[test]
fn granted_sizes_are_told() {
    let mut rig = Rig::new();
    let params = rig.params(GIB + 1);
    assert_eq!(rig.alloc(DEVICE, 0x10, VIDEO, params), (0, 0x10));
    let out = rig.process.at(params);
    assert_eq!(u64_at(&out, memparams::LIMIT) + 1, GIB + MIB2);
    assert_eq!(u64_at(&out, memparams::REQUESTED), GIB + MIB2);
    assert_eq!(rig.used(), GIB + MIB2);
}

#[test]
fn the_card_is_never_over_full() {
    let mut rig = Rig::new();
    for size in [4 * GIB + 1, 200 << 30, 16 << 40, u64::MAX] {
        assert_eq!(rig.memory(0x10, size), status::NO_MEMORY);
    }
    assert_eq!(rig.memory(0x10, 3 * GIB), status::OK);
    assert_eq!(rig.memory(0x11, 2 * GIB), status::NO_MEMORY);
    assert_eq!(rig.memory(0x12, GIB), status::OK);
    assert_eq!(rig.memory(0x13, 1), status::NO_MEMORY);
    assert_eq!(rig.sim.memory().card(0).refused, 6);
    rig.free(0x12);
    assert_eq!(rig.memory(0x13, 1), status::OK);
    assert_eq!(rig.used(), 3 * GIB + (64 << 10));
}

#[test]
fn bad_requests_have_the_driver_s_answers() {
    let mut rig = Rig::new();
    assert_eq!(rig.memory(0x10, 0), status::INVALID_ARGUMENT);
    assert_eq!(
        rig.alloc(DEVICE, 0x10, VIDEO, 0).0,
        status::INVALID_ARGUMENT
    );
    assert_eq!(
        rig.alloc(DEVICE, 0x10, VIDEO, 0x9999).0,
        status::INVALID_ADDRESS
    );
    let params = rig.params(GIB);
    assert_eq!(
        rig.alloc(0x77, 0x10, VIDEO, params).0,
        status::OBJECT_NOT_FOUND
    );
    assert_eq!(rig.memory(0x10, GIB), status::OK);
    assert_eq!(rig.memory(0x10, GIB), status::INSERT_DUPLICATE_NAME);
    // Addresses only, and memory of the host, are no video memory.
    let mut host = [0; 128];
    put_u64(&mut host, memparams::REQUESTED, GIB);
    put_u32(&mut host, memparams::ATTR, 1 << heap::ATTR_LOCATION_SHIFT);
    let host = rig.process.place(0x1500, &host);
    assert_eq!(
        rig.alloc(DEVICE, 0x11, VIDEO, host).0,
        status::INVALID_ARGUMENT
    );
    assert_eq!(
        rig.alloc(DEVICE, 0x11, class::NV01_MEMORY_SYSTEM, host).0,
        status::OK
    );
    assert_eq!(
        rig.alloc(DEVICE, 0x12, class::NV50_MEMORY_VIRTUAL, host).0,
        status::OK
    );
    assert_eq!(rig.used(), GIB);
}

#[test]
fn serialised_parameters_are_refused() {
    let mut rig = Rig::new();
    let params = rig.params(GIB);
    let mut arg = [0; 48];
    put_u32(&mut arg, nvos64::ROOT, rig.client);
    put_u32(&mut arg, nvos64::PARENT, DEVICE);
    put_u32(&mut arg, nvos64::CLASS, VIDEO);
    put_u64(&mut arg, nvos64::PARAMS, params);
    put_u32(&mut arg, nvos64::FLAGS, 1);
    rig.call(CTL, nr::RM_ALLOC, &mut arg).unwrap();
    assert_eq!(u32_at(&arg, nvos64::STATUS), 0x6a);
    assert_eq!(rig.used(), 0);
}

#[test]
fn a_device_needs_its_file() {
    let mut rig = Rig::new();
    rig.process.open.clear();
    let client = rig.client;
    let mut device = [0; 56];
    put_u32(&mut device, 0, 1);
    let params = rig.process.place(0x1500, &device);
    assert_eq!(
        rig.alloc(client, 0x20, class::NV01_DEVICE_0, params).0,
        status::INSUFFICIENT_PERMISSIONS
    );
    // A descriptor that it inherited is as good as one that it opened.
    rig.process.open = vec![Node::Gpu(1)];
    assert_eq!(rig.alloc(client, 0x20, class::NV01_DEVICE_0, params).0, 0);
    let params = rig.params(GIB);
    assert_eq!(rig.alloc(0x20, 0x21, VIDEO, params).0, 0);
    assert_eq!(rig.sim.memory().card(1).used, GIB);
    assert_eq!(rig.used(), 0);
}

#[test]
fn a_client_works_only_through_its_file() {
    let mut rig = Rig::new();
    rig.sim.open(9, Node::Ctl, 200);
    let params = rig.params(GIB);
    let (status, _) = rig.alloc_by(9, DEVICE, 0x10, VIDEO, params);
    assert_eq!(status, status::INVALID_CLIENT);
    // The GPU's file speaks for the control file that it is tied to.
    assert_eq!(
        rig.alloc_by(GPU0, DEVICE, 0x10, 0x79, 0).0,
        status::INVALID_CLIENT
    );
    assert!(rig.sim.register(GPU0, CTL));
    assert!(!rig.sim.register(GPU0, 9));
    assert_eq!(rig.alloc_by(GPU0, DEVICE, 0x10, 0x79, 0).0, status::OK);
    // Another process on the same open file is the same to the driver.
    rig.process.pid = 300;
    assert_eq!(rig.memory(0x11, GIB), status::OK);
    assert_eq!(rig.sim.state(0, 0, true).bytes_of(0, 100), GIB);
}

#[test]
fn clients_are_numbered_in_order() {
    let mut rig = Rig::new();
    assert_eq!(rig.client, FIRST_CLIENT);
    assert_eq!(
        rig.alloc(0, 0, class::NV01_ROOT_CLIENT, 0),
        (0, FIRST_CLIENT + 1)
    );
    // Whatever handle the caller wishes for.
    assert_eq!(
        rig.alloc(0, 0xc1d0_abcd, class::NV01_ROOT_NON_PRIV, 0),
        (0, FIRST_CLIENT + 2)
    );
}

#[test]
fn freeing_an_ancestor_frees_all_below() {
    for doomed in [SUBDEVICE, DEVICE, FIRST_CLIENT] {
        let mut rig = Rig::new();
        let params = rig.params(GIB);
        assert_eq!(rig.alloc(SUBDEVICE, 0x10, VIDEO, params).0, status::OK);
        assert_eq!(rig.used(), GIB);
        assert_eq!(rig.free(0x7777), status::OK);
        assert_eq!(rig.used(), GIB);
        assert_eq!(rig.free(doomed), status::OK);
        assert_eq!(rig.used(), 0, "{doomed:#x}");
    }
}

#[test]
fn the_last_close_frees_the_clients() {
    let mut rig = Rig::new();
    assert_eq!(rig.memory(0x10, GIB), status::OK);
    assert!(rig.sim.register(GPU0, CTL));
    rig.sim.release(CTL);
    assert_eq!(rig.used(), GIB);
    rig.sim.release(GPU0);
    assert_eq!(rig.used(), 0);
    assert!(rig.sim.state(0, 0, true).clients.is_empty());
}

#[test]
fn every_layout_counts() {
    let mut rig = Rig::new();
    // The short layout.
    let params = rig.params(GIB);
    let mut arg = [0; 32];
    put_u32(&mut arg, nvos64::ROOT, rig.client);
    put_u32(&mut arg, nvos64::PARENT, DEVICE);
    put_u32(&mut arg, nvos64::CLASS, VIDEO);
    put_u64(&mut arg, nvos64::PARAMS, params);
    let inner = arg;
    rig.call(CTL, nr::RM_ALLOC, &mut arg).unwrap();
    assert_eq!(u32_at(&arg, nvos64::STATUS_NVOS21), status::OK);
    let generated = u32_at(&arg, nvos64::NEW);
    assert_ne!(generated, 0);
    assert_eq!(rig.used(), GIB);
    rig.free(generated);

    // By pointer.
    rig.params(GIB);
    let pointer = rig.process.place(0x4000, &inner);
    let mut outer = [0; 16];
    put_u32(&mut outer, xfer::CMD, nr::RM_ALLOC.into());
    put_u32(&mut outer, xfer::INNER_SIZE, 32);
    put_u64(&mut outer, xfer::PTR, pointer);
    rig.call(CTL, nr::IOCTL_XFER_CMD, &mut outer).unwrap();
    let out = rig.process.at(pointer);
    assert_eq!(u32_at(&out, nvos64::STATUS_NVOS21), status::OK);
    assert_eq!(rig.used(), GIB);
    rig.free(u32_at(&out, nvos64::NEW));
    put_u32(&mut outer, xfer::CMD, nr::IOCTL_XFER_CMD.into());
    assert_eq!(
        rig.call(CTL, nr::IOCTL_XFER_CMD, &mut outer),
        Err(libc::EINVAL)
    );
    put_u32(&mut outer, xfer::CMD, 0x100 | u32::from(nr::RM_ALLOC));
    assert_eq!(
        rig.call(CTL, nr::IOCTL_XFER_CMD, &mut outer),
        Err(libc::EINVAL)
    );

    // The legacy call on the GPU's file: a window on the whole card, which takes nothing.
    assert!(rig.sim.register(GPU0, CTL));
    let mut arg = [0; 56];
    put_u32(&mut arg, nvos02::ROOT, rig.client);
    put_u32(&mut arg, nvos02::PARENT, DEVICE);
    put_u32(&mut arg, nvos02::NEW, 0x10);
    put_u32(&mut arg, nvos02::CLASS, VIDEO);
    put_u64(&mut arg, nvos02::LIMIT, GIB - 1);
    rig.call(GPU0, nr::RM_ALLOC_MEMORY, &mut arg).unwrap();
    assert_eq!(u32_at(&arg, nvos02::STATUS), status::OK);
    assert_eq!(u64_at(&arg, nvos02::LIMIT), 4 * GIB - 1);
    assert_eq!(rig.used(), 0);
    rig.free(0x10);
    put_u32(
        &mut arg,
        nvos02::CLASS,
        class::NV01_MEMORY_SYSTEM_OS_DESCRIPTOR,
    );
    rig.call(GPU0, nr::RM_ALLOC_MEMORY, &mut arg).unwrap();
    assert_eq!(u32_at(&arg, nvos02::STATUS), status::OK);
    assert_eq!(rig.used(), 0);
}

#[test]
fn the_older_allocator_counts_too() {
    let mut rig = Rig::new();
    let alloc = |rig: &mut Rig, function, fill: &dyn Fn(&mut [u8])| {
        let mut arg = [0; 184];
        put_u32(&mut arg, nvos32::ROOT, rig.client);
        put_u32(&mut arg, nvos32::PARENT, DEVICE);
        put_u32(&mut arg, nvos32::FUNCTION, function);
        put_u32(&mut arg, 40, 1);
        fill(&mut arg);
        rig.call(CTL, nr::RM_VID_HEAP_CONTROL, &mut arg).unwrap();
        arg
    };
    let arg = alloc(&mut rig, nvos32::FN_ALLOC_SIZE, &|arg| {
        put_u64(arg, nvos32::ALLOC_SIZE_SIZE, GIB);
    });
    assert_eq!(u32_at(&arg, nvos32::STATUS), status::OK);
    assert_eq!(u64_at(&arg, 112), GIB - 1);
    let handle = u32_at(&arg, nvos32::MEMORY);
    alloc(&mut rig, nvos32::FN_ALLOC_SIZE_RANGE, &|arg| {
        put_u64(arg, nvos32::RANGE_SIZE, GIB);
    });
    // Height times pitch; the size that the caller writes does not count.
    alloc(&mut rig, nvos32::FN_ALLOC_TILED, &|arg| {
        put_u32(arg, nvos32::TILED_HEIGHT, 1 << 14);
        put_u32(arg, nvos32::TILED_PITCH, 1 << 16);
        put_u64(arg, nvos32::TILED_SIZE, 4096);
    });
    assert_eq!(rig.used(), 3 * GIB);
    let arg = alloc(&mut rig, nvos32::FN_ALLOC_SIZE, &|arg| {
        put_u64(arg, nvos32::ALLOC_SIZE_SIZE, 2 * GIB);
    });
    assert_eq!(u32_at(&arg, nvos32::STATUS), status::NO_MEMORY);
    // Total and free are told when they are asked for.
    assert_eq!(u64_at(&arg, 32), 0);
    let arg = alloc(&mut rig, 5, &|_| {});
    assert_eq!((u64_at(&arg, 24), u64_at(&arg, 32)), (4 * GIB, GIB));
    let arg = alloc(&mut rig, nvos32::FN_ALLOC_SIZE, &|arg| {
        put_u32(arg, 40, 0);
        put_u64(arg, nvos32::ALLOC_SIZE_SIZE, GIB);
    });
    assert_eq!(u32_at(&arg, nvos32::STATUS), status::INVALID_OWNER);
    // Addresses only.
    alloc(&mut rig, nvos32::FN_ALLOC_SIZE, &|arg| {
        put_u32(arg, nvos32::FLAGS, heap::FLAGS_VIRTUAL);
        put_u64(arg, nvos32::ALLOC_SIZE_SIZE, 64 * GIB);
    });
    assert_eq!(rig.used(), 3 * GIB);
    let free = |arg: &mut [u8]| {
        put_u32(arg, nvos32::MEMORY, handle);
        put_u32(arg, 48, 1);
    };
    alloc(&mut rig, nvos32::FN_FREE, &free);
    assert_eq!(rig.used(), 2 * GIB);
    assert_eq!(
        u32_at(&alloc(&mut rig, 19, &|_| {}), nvos32::STATUS),
        status::INVALID_ARGUMENT
    );
}

#[test]
fn a_duplicate_keeps_the_memory() {
    let mut rig = Rig::new();
    assert_eq!(rig.memory(0x10, GIB), status::OK);
    let mut arg = [0; 28];
    put_u32(&mut arg, nvos55::CLIENT, rig.client);
    put_u32(&mut arg, nvos55::PARENT, DEVICE);
    put_u32(&mut arg, nvos55::CLIENT_SRC, rig.client);
    put_u32(&mut arg, nvos55::OBJECT_SRC, 0x10);
    rig.call(CTL, nr::RM_DUP_OBJECT, &mut arg).unwrap();
    assert_eq!(u32_at(&arg, nvos55::STATUS), status::OK);
    let copy = u32_at(&arg, nvos55::OBJECT);
    rig.free(0x10);
    assert_eq!(rig.used(), GIB);
    rig.free(copy);
    assert_eq!(rig.used(), 0);
    // Another process may only take what is shared.
    assert_eq!(rig.memory(0x10, GIB), status::OK);
    put_u32(&mut arg, nvos55::OBJECT, 0);
    rig.process.pid = 200;
    rig.call(CTL, nr::RM_DUP_OBJECT, &mut arg).unwrap();
    assert_eq!(
        u32_at(&arg, nvos55::STATUS),
        status::INSUFFICIENT_PERMISSIONS
    );
    let mut share = [0; 24];
    put_u32(&mut share, 0, rig.client);
    put_u32(&mut share, 4, 0x10);
    rig.call(CTL, nr::RM_SHARE, &mut share).unwrap();
    rig.call(CTL, nr::RM_DUP_OBJECT, &mut arg).unwrap();
    assert_eq!(u32_at(&arg, nvos55::STATUS), status::OK);
}

#[test]
fn a_mapping_keeps_the_memory() {
    let mut rig = Rig::new();
    assert_eq!(rig.memory(0x10, GIB), status::OK);
    let mut range = [0; 24];
    put_u64(&mut range, uvm_args::BASE, 1 << 40);
    put_u64(&mut range, uvm_args::LENGTH, GIB);
    rig.uvm(uvm::CREATE_EXTERNAL_RANGE, &mut range);
    assert_eq!(
        u32_at(&range, uvm_args::RANGE_STATUS),
        status::ILLEGAL_ACTION
    );
    rig.uvm(uvm::INITIALIZE, &mut [0; 16]);
    rig.uvm(uvm::CREATE_EXTERNAL_RANGE, &mut range);
    assert_eq!(u32_at(&range, uvm_args::RANGE_STATUS), status::OK);
    let mut map = vec![0; uvm_args::MAP_EXTERNAL_SIZE];
    put_u64(&mut map, uvm_args::BASE, 1 << 40);
    put_u64(&mut map, uvm_args::LENGTH, GIB);
    put_u32(&mut map, uvm_args::MAP_EXTERNAL_CLIENT, rig.client);
    put_u32(&mut map, uvm_args::MAP_EXTERNAL_MEMORY, 0x10);
    rig.uvm(uvm::MAP_EXTERNAL_ALLOCATION, &mut map);
    assert_eq!(u32_at(&map, uvm_args::MAP_EXTERNAL_STATUS), status::OK);
    rig.free(0x10);
    assert_eq!(rig.used(), GIB);
    let mut outside = map.clone();
    put_u64(&mut outside, uvm_args::BASE, 1 << 41);
    rig.uvm(uvm::MAP_EXTERNAL_ALLOCATION, &mut outside);
    assert_ne!(u32_at(&outside, uvm_args::MAP_EXTERNAL_STATUS), status::OK);
    rig.uvm(uvm::FREE, &mut range);
    assert_eq!(rig.used(), 0);
    // Or until the file is closed.
    assert_eq!(rig.memory(0x10, GIB), status::OK);
    rig.uvm(uvm::CREATE_EXTERNAL_RANGE, &mut range);
    rig.uvm(uvm::MAP_EXTERNAL_ALLOCATION, &mut map);
    rig.sim.release(CTL);
    assert_eq!(rig.used(), GIB);
    rig.sim.release(UVM);
    assert_eq!(rig.used(), 0);
}

#[test]
fn managed_memory_moves() {
    let mut rig = Rig::new();
    rig.uvm(uvm::INITIALIZE, &mut [0; 16]);
    rig.sim.memory_mut().create_managed(100, 1 << 40, 2 * GIB);
    rig.sim.memory_mut().touch_managed(100, 1 << 40, 0);
    assert_eq!(rig.used(), 2 * GIB);
    let mut arg = [0; uvm_args::MIGRATE_SIZE];
    put_u64(&mut arg, uvm_args::BASE, 1 << 40);
    put_u64(&mut arg, uvm_args::LENGTH, 2 * GIB);
    put(&mut arg, uvm_args::MIGRATE_UUID, &uvm_args::CPU_UUID);
    // Asked by another process through the same open file.
    rig.process.pid = 1;
    let address = rig.process.place(0x3000, &arg);
    let duration = rig
        .sim
        .uvm_duration(UVM, uvm::MIGRATE, address, &rig.process);
    assert!((500_000_000..600_000_000).contains(&duration), "{duration}");
    rig.uvm(uvm::MIGRATE, &mut arg);
    assert_eq!(u32_at(&arg, uvm_args::MIGRATE_STATUS), status::OK);
    assert_eq!(rig.used(), 0);
    let uuid = rig.sim.config().gpus[0].uuid;
    put(&mut arg, uvm_args::MIGRATE_UUID, &uuid);
    rig.uvm(uvm::MIGRATE, &mut arg);
    assert_eq!(rig.used(), 2 * GIB);
    rig.sim.release(UVM);
    assert_eq!(rig.used(), 0);
}

#[test]
fn a_context_costs_what_no_object_shows() {
    let mut rig = Rig::new();
    let hidden = rig.sim.config().context_hidden;
    let group = class::KEPLER_CHANNEL_GROUP_A;
    assert_eq!(
        rig.alloc(DEVICE, 0x15, group, 0).0,
        status::INVALID_ARGUMENT
    );
    let params = rig.group_params();
    assert_eq!(rig.alloc(DEVICE, 0x15, group, params).0, status::OK);
    assert_eq!(rig.alloc(DEVICE, 0x16, group, params).0, status::OK);
    assert_eq!(rig.used(), hidden);
    rig.free(0x15);
    assert_eq!(rig.used(), hidden);
    rig.free(DEVICE);
    assert_eq!(rig.used(), 0);
}

fn with_channels() -> Rig {
    let mut rig = Rig::new();
    let params = rig.group_params();
    let group = class::KEPLER_CHANNEL_GROUP_A;
    assert_eq!(rig.alloc(DEVICE, 0x15, group, params).0, 0);
    for channel in [0x1c, 0x1d] {
        let class = class::HOPPER_CHANNEL_GPFIFO_A;
        assert_eq!(rig.alloc(0x15, channel, class, 0).0, 0);
    }
    rig
}

#[test]
fn slices_can_be_set_and_read() {
    let mut rig = with_channels();
    let mut slice = [0; 8];
    assert_eq!(rig.control(0x15, ctrl::TSG_GET_TIMESLICE, &mut slice), 0);
    assert_eq!(u64::from_ne_bytes(slice), DEFAULT_SLICE_US);
    let mut slice = 3000u64.to_ne_bytes();
    assert_eq!(rig.control(0x15, ctrl::TSG_SET_TIMESLICE, &mut slice), 0);
    let mut slice = [0; 8];
    rig.control(0x15, ctrl::TSG_GET_TIMESLICE, &mut slice);
    assert_eq!(u64::from_ne_bytes(slice), 3000);
    assert_eq!(
        rig.control(0x99, ctrl::TSG_GET_TIMESLICE, &mut slice),
        status::OBJECT_NOT_FOUND
    );
    assert_eq!(
        rig.control(DEVICE, ctrl::TSG_GET_TIMESLICE, &mut slice),
        status::NOT_SUPPORTED
    );
    assert_eq!(
        rig.control(0x15, ctrl::TSG_GET_TIMESLICE, &mut [0; 4]),
        status::INVALID_ARGUMENT
    );
    // Its length is what counts.
    for (params, status) in [(vec![1, 0, 0], 0), (vec![0; 3], 0), (vec![1, 0], 0x1f)] {
        let mut params = params;
        let got = rig.control(0x15, ctrl::TSG_GPFIFO_SCHEDULE, &mut params);
        assert_eq!(got, status);
    }
    let unknown = rig.control(0x15, 0xa06c_0999, &mut [0; 8]);
    assert_eq!(unknown, status::NOT_SUPPORTED);
    assert_eq!(rig.control(0x15, ctrl::TSG_PREEMPT, &mut [0; 8]), 0);
    // Levels are for those who may raise priorities.
    let mut level = 2u32.to_ne_bytes();
    assert_eq!(
        rig.control(0x15, ctrl::TSG_SET_INTERLEAVE_LEVEL, &mut level),
        status::INSUFFICIENT_PERMISSIONS
    );
    rig.process.nice = true;
    assert_eq!(
        rig.control(0x15, ctrl::TSG_SET_INTERLEAVE_LEVEL, &mut level),
        0
    );
    let mut level = [0; 4];
    assert_eq!(
        rig.control(0x15, ctrl::TSG_GET_INTERLEAVE_LEVEL, &mut level),
        0
    );
    assert_eq!(u32::from_ne_bytes(level), 2);
}

#[test]
fn channels_can_be_disabled() {
    let mut rig = with_channels();
    let client = rig.client;
    rig.sim.submit(client, 0x1c, 1_000_000, 100).unwrap();
    let mut arg = [0; disable_channels::SIZE];
    arg[disable_channels::DISABLE] = 1;
    put_u32(&mut arg, disable_channels::COUNT, 2);
    for (index, channel) in [0x1c, 0x1d].into_iter().enumerate() {
        put_u32(&mut arg, disable_channels::CLIENTS + 4 * index, client);
        put_u32(&mut arg, disable_channels::CHANNELS + 4 * index, channel);
    }
    rig.sim.advance(10_000_000);
    let before = rig.sim.progress(client, 0x1c).unwrap().completed;
    assert!(before > 0);
    assert_eq!(
        rig.control(SUBDEVICE, ctrl::FIFO_DISABLE_CHANNELS, &mut arg),
        0
    );
    rig.sim.advance(1_000_000_000);
    assert_eq!(rig.sim.progress(client, 0x1c).unwrap().completed, before);
    arg[disable_channels::DISABLE] = 0;
    assert_eq!(
        rig.control(SUBDEVICE, ctrl::FIFO_DISABLE_CHANNELS, &mut arg),
        0
    );
    rig.sim.advance(2_000_000_000);
    assert_eq!(rig.sim.progress(client, 0x1c).unwrap().completed, 100);
    let mut refused = |change: &dyn Fn(&mut [u8])| {
        let mut changed = arg;
        change(&mut changed);
        rig.control(SUBDEVICE, ctrl::FIFO_DISABLE_CHANNELS, &mut changed)
    };
    assert_eq!(
        refused(&|arg| put_u64(arg, disable_channels::EVENT, 0x1234)),
        status::INSUFFICIENT_PERMISSIONS
    );
    assert_eq!(
        refused(&|arg| put_u32(arg, disable_channels::CHANNELS, 0x99)),
        status::INVALID_CHANNEL
    );
    for count in [0, 65] {
        assert_eq!(
            refused(&|arg| put_u32(arg, disable_channels::COUNT, count)),
            status::INVALID_PARAM_STRUCT
        );
    }
}

#[test]
fn channels_of_others_can_be_disabled_too() {
    let mut rig = with_channels();
    let victim = rig.client;
    rig.sim.open(9, Node::Ctl, 200);
    rig.client = rig.alloc_by(9, 0, 0, class::NV01_ROOT, 0).1;
    let client = rig.client;
    assert_eq!(
        rig.alloc_by(9, client, DEVICE, class::NV01_DEVICE_0, 0).0,
        0
    );
    let subdevice = rig.alloc_by(9, DEVICE, SUBDEVICE, class::NV20_SUBDEVICE_0, 0);
    assert_eq!(subdevice.0, 0);
    let mut arg = [0; disable_channels::SIZE];
    arg[disable_channels::DISABLE] = 1;
    put_u32(&mut arg, disable_channels::COUNT, 1);
    put_u32(&mut arg, disable_channels::CLIENTS, victim);
    put_u32(&mut arg, disable_channels::CHANNELS, 0x1c);
    let address = rig.process.place(0x2000, &arg);
    let mut call = [0; 32];
    put_u32(&mut call, nvos54::CLIENT, client);
    put_u32(&mut call, nvos54::OBJECT, SUBDEVICE);
    put_u32(&mut call, nvos54::CMD, ctrl::FIFO_DISABLE_CHANNELS);
    put_u64(&mut call, nvos54::PARAMS, address);
    put_u32(&mut call, nvos54::PARAMS_SIZE, 536);
    rig.call(9, nr::RM_CONTROL, &mut call).unwrap();
    assert_eq!(u32_at(&call, nvos54::STATUS), status::OK);
    rig.sim.submit(victim, 0x1c, 1000, 5).unwrap();
    rig.sim.advance(1_000_000_000);
    assert_eq!(rig.sim.progress(victim, 0x1c).unwrap().completed, 0);
}

#[test]
fn handles_can_be_asked_about() {
    let mut rig = with_channels();
    let client = rig.client;
    let mut ask = |handle, index| {
        let mut arg = [0; handle_info::SIZE];
        put_u32(&mut arg, handle_info::OBJECT, handle);
        put_u32(&mut arg, handle_info::INDEX, index);
        let status = rig.control(client, ctrl::CLIENT_GET_HANDLE_INFO, &mut arg);
        (status, u64_at(&arg, handle_info::DATA))
    };
    assert_eq!(ask(0x1c, handle_info::INDEX_PARENT), (0, 0x15));
    assert_eq!(ask(0x1c, handle_info::INDEX_CLASS), (0, 0xc86f));
    assert_eq!(
        ask(0x99, handle_info::INDEX_CLASS).0,
        status::OBJECT_NOT_FOUND
    );
    assert_eq!(rig.memory(0x20, GIB), 0);
    let pair = surface_info::INDEX_PHYS_SIZE.to_ne_bytes();
    let list = rig.process.place(0x5000, &[pair, [0; 4]].concat());
    let mut arg = [0; surface_info::SIZE];
    put_u32(&mut arg, surface_info::COUNT, 1);
    put_u64(&mut arg, surface_info::LIST, list);
    assert_eq!(
        rig.control(0x20, ctrl::MEMORY_GET_SURFACE_INFO, &mut arg),
        0
    );
    assert_eq!(u64::from(u32_at(&rig.process.at(list), 4)) << 12, GIB);
}

#[test]
fn cards_are_listed() {
    let mut rig = Rig::new();
    let mut arg = vec![0; 32 * card::SIZE];
    rig.call(CTL, nr::CARD_INFO, &mut arg).unwrap();
    let second = &arg[card::SIZE..2 * card::SIZE];
    assert_eq!(second[card::VALID], 1);
    assert_eq!(u32_at(second, card::MINOR), 1);
    assert_eq!(arg[2 * card::SIZE + card::VALID], 0);
    let id = u32_at(second, card::GPU_ID);
    let mut info = [0; 32];
    put_u32(&mut info, 0, id);
    let client = rig.client;
    assert_eq!(rig.control(client, ctrl::GPU_GET_ID_INFO_V2, &mut info), 0);
    assert_eq!(u32_at(&info, 8), 1);
    let mut ids = [0; 128];
    assert_eq!(rig.control(client, ctrl::GPU_GET_ATTACHED_IDS, &mut ids), 0);
    assert_eq!(u32_at(&ids, 4), id);
    assert_eq!(u32_at(&ids, 8), u32::MAX);
}

#[test]
fn allocations_fail_when_told_to() {
    let mut rig = Rig::new();
    rig.sim.fail_allocations(status::BUSY_RETRY, 2);
    assert_eq!(rig.memory(0x10, GIB), status::BUSY_RETRY);
    assert_eq!(rig.memory(0x10, GIB), status::BUSY_RETRY);
    assert_eq!(rig.memory(0x10, GIB), status::OK);
}

#[test]
fn an_xid_stops_a_process() {
    let mut rig = with_channels();
    rig.sim.submit(rig.client, 0x1c, 1_000_000, 100).unwrap();
    rig.sim.raise_xid(0, 31, Some(100));
    let progress = rig.sim.progress(rig.client, 0x1c).unwrap();
    assert_eq!(progress.fault, Some(31));
    assert_eq!(rig.sim.state(0, 0, false).gpus[0].xids[0].code, 31);
}

#[test]
fn uuids_are_written_and_read() {
    let gpu = GpuConfig::numbered(1, GIB);
    let text = gpu.uuid_text();
    assert!(text.starts_with("GPU-") && text.len() == 40, "{text}");
    assert_eq!(GpuConfig::parse_uuid(&text), Ok(gpu.uuid));
    assert!(GpuConfig::parse_uuid("GPU-12").is_err());
    assert!(GpuConfig::parse_uuid("GPU-zz3a6d1e-0c0d-4e00-9a70-73696d677075").is_err());
}

mod sequences {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Op {
        Alloc(u32, u64),
        Free(u32),
        Dup(u32, u32),
        FreeDevice,
        Close,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            8 => (0x10..0x20u32, 1..3 * GIB).prop_map(|(handle, size)| Op::Alloc(handle, size)),
            6 => (0x10..0x30u32).prop_map(Op::Free),
            3 => (0x10..0x20u32, 0x20..0x30u32).prop_map(|(from, to)| Op::Dup(from, to)),
            1 => Just(Op::FreeDevice),
            1 => Just(Op::Close),
        ]
    }

    proptest! {
        /// Whatever a process does, what is taken is what its handles refer to.
        #[test]
        fn memory_is_what_handles_refer_to(ops in prop::collection::vec(op(), 1..80)) {
            let mut rig = Rig::new();
            // Handle to block, block to size.
            let mut handles: BTreeMap<u32, u32> = BTreeMap::new();
            let mut sizes: BTreeMap<u32, u64> = BTreeMap::new();
            let mut next = 0;
            for op in ops {
                match op {
                    Op::Alloc(handle, size) => {
                        let granted = vidmem::granted_size(size, 0).unwrap();
                        let expected = if handles.contains_key(&handle) {
                            status::INSERT_DUPLICATE_NAME
                        } else if rig.used() + granted > 4 * GIB {
                            status::NO_MEMORY
                        } else {
                            status::OK
                        };
                        prop_assert_eq!(rig.memory(handle, size), expected);
                        if expected == status::OK {
                            next += 1;
                            handles.insert(handle, next);
                            sizes.insert(next, granted);
                        }
                    }
                    Op::Free(handle) => {
                        rig.free(handle);
                        handles.remove(&handle);
                    }
                    Op::Dup(from, to) => {
                        let mut arg = [0; 28];
                        put_u32(&mut arg, nvos55::CLIENT, rig.client);
                        put_u32(&mut arg, nvos55::PARENT, DEVICE);
                        put_u32(&mut arg, nvos55::OBJECT, to);
                        put_u32(&mut arg, nvos55::CLIENT_SRC, rig.client);
                        put_u32(&mut arg, nvos55::OBJECT_SRC, from);
                        rig.call(CTL, nr::RM_DUP_OBJECT, &mut arg).unwrap();
                        if let Some(block) = handles.get(&from).copied()
                            && !handles.contains_key(&to)
                        {
                            prop_assert_eq!(u32_at(&arg, nvos55::STATUS), status::OK);
                            handles.insert(to, block);
                        } else {
                            prop_assert_ne!(u32_at(&arg, nvos55::STATUS), status::OK);
                        }
                    }
                    Op::FreeDevice => {
                        rig.free(DEVICE);
                        handles.clear();
                        let client = rig.client;
                        let device = rig.alloc(client, DEVICE, class::NV01_DEVICE_0, 0);
                        prop_assert_eq!(device.0, status::OK);
                    }
                    Op::Close => {
                        rig.sim.release(CTL);
                        prop_assert_eq!(rig.used(), 0);
                        rig = Rig::new();
                        handles.clear();
                    }
                }
                sizes.retain(|block, _| handles.values().any(|held| held == block));
                prop_assert_eq!(rig.used(), sizes.values().sum::<u64>());
                prop_assert!(rig.used() <= 4 * GIB);
            }
        }
    }
}
