//! The simulated library and server against the recording of the real ones: the same program must make the
//! same calls with the same handles and sizes.
#![allow(clippy::unwrap_used, reason = "a test panics")]

use gpuquota_simgpu::fixture::{Options, SimGpu};
use gpuquota_simgpu::side;
use gpuquota_simgpu::tenant::cuda::Cuda;

const RECORDING: &str = include_str!("data/cuda-driver-api.txt");

/// The calls that follow a `### name` line, for several names in order.
fn recorded(names: &[&str]) -> Vec<String> {
    let mut calls = Vec::new();
    let mut taken = false;
    let mut left = names.iter().peekable();
    for line in RECORDING.lines().filter(|line| !line.starts_with("# ")) {
        if let Some(name) = line.strip_prefix("### ") {
            taken = left.next_if(|wanted| name.starts_with(**wanted)).is_some();
        } else if taken {
            calls.push(line.to_owned());
        }
    }
    assert!(left.peek().is_none(), "not in the recording: {left:?}");
    calls
}

/// The server's lines in the recording's form.
fn normal(trace: &str) -> Vec<String> {
    trace
        .lines()
        .map(|line| {
            let words: Vec<String> = line
                .split(' ')
                .filter(|word| {
                    let name = word.split('=').next().unwrap_or_default();
                    let uvm = line.starts_with("/dev/nvidia-uvm");
                    match name {
                        "nr" => !uvm,
                        "parent" => !line.contains(" FREE "),
                        "req" | "sz" | "cls" | "cmd" | "new" | "obj" | "flags" | "attr"
                        | "size" => true,
                        _ => word.starts_with("/dev/"),
                    }
                })
                .map(|word| match word.split_once("=c1d") {
                    Some((name, _)) => format!("{name}=client"),
                    None => word.to_owned(),
                })
                .collect();
            words.join(" ")
        })
        .collect()
}

struct Comparison<'a> {
    sim: &'a SimGpu,
    seen: usize,
}

impl Comparison<'_> {
    /// The calls made since the last look.
    fn new_calls(&mut self) -> Vec<String> {
        let all = normal(&self.sim.trace().unwrap());
        all[std::mem::replace(&mut self.seen, all.len())..].to_vec()
    }

    #[track_caller]
    fn same(&mut self, names: &[&str]) {
        assert_same(names, &recorded(names), &self.new_calls());
    }

    /// As [`Self::same`], but the handles may be other ones: which ones come back after many frees is not
    /// known.
    #[track_caller]
    fn same_but_handles(&mut self, names: &[&str]) {
        let without = |calls: Vec<String>| -> Vec<String> {
            calls
                .iter()
                .map(|call| {
                    call.split(' ')
                        .filter(|word| !word.starts_with("new=") && !word.starts_with("obj=5c"))
                        .collect::<Vec<_>>()
                        .join(" ")
                })
                .collect()
        };
        assert_same(names, &without(recorded(names)), &without(self.new_calls()));
    }
}

#[track_caller]
fn assert_same(names: &[&str], recorded: &[String], got: &[String]) {
    let longer = recorded.len().max(got.len());
    let difference = (0..longer).find(|at| recorded.get(*at) != got.get(*at));
    if let Some(at) = difference {
        panic!(
            "{names:?}, call {at} of {} recorded and {} made:\n recorded {:?}\n made     {:?}",
            recorded.len(),
            got.len(),
            recorded.get(at),
            got.get(at)
        );
    }
}

#[test]
fn the_recorded_program_makes_the_recorded_calls() {
    let sim = SimGpu::spawn(&Options {
        gpus: 1,
        trace: true,
        ..Options::default()
    })
    .unwrap();
    // SAFETY: the only test of this program, so no other thread reads the environment.
    unsafe { std::env::set_var(side::DIR_VARIABLE, sim.devices()) };
    let library = sim.libraries().join("libcuda.so.1");
    let mut compare = Comparison { sim: &sim, seen: 0 };

    let cuda = Cuda::open(library.to_str().unwrap(), 0).unwrap();
    compare.same(&[
        "cuInit",
        "cuDeviceGet(",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
        "cuStreamCreate",
    ]);
    cuda.memory_info().unwrap();
    compare.same(&["cuMemGetInfo"]);

    let p = cuda.alloc(1 << 20).unwrap();
    compare.same(&["cuMemAlloc(&p,1<<20)"]);
    let q = cuda.alloc(1 << 20).unwrap();
    compare.same(&["cuMemAlloc(&q,1<<20)"]);
    cuda.free(q).unwrap();
    compare.same(&["cuMemFree(q)"]);
    cuda.free(p).unwrap();
    compare.same(&["cuMemFree(p)"]);

    for gib in [1, 3] {
        let call = format!("cuMemAlloc(&p,{gib}ull<<30)");
        let p = cuda.alloc(gib << 30).unwrap();
        compare.same(&[&call]);
        cuda.free(p).unwrap();
        let calls = compare.new_calls();
        assert_same(&[&call, "cuMemFree"], &recorded(&["cuMemFree(p)"]), &calls);
    }

    let p = cuda.alloc_async(1 << 30).unwrap();
    compare.same(&["cuMemAllocAsync"]);
    cuda.synchronize().unwrap();
    compare.same(&["cuStreamSynchronize"]);
    cuda.free_async(p).unwrap();
    compare.same(&["cuMemFreeAsync", "cuStreamSynchronize"]);

    let p = cuda.alloc_managed(1 << 30).unwrap();
    compare.same(&["cuMemAllocManaged"]);
    cuda.free(p).unwrap();
    let managed_free: Vec<String> = RECORDING
        .lines()
        .skip_while(|line| !line.starts_with("### cuCtxSynchronize"))
        .skip(2)
        .take_while(|line| !line.starts_with("###"))
        .map(str::to_owned)
        .collect();
    assert_eq!(managed_free.len(), 5);
    assert_same(
        &["cuMemFree of managed memory"],
        &managed_free,
        &compare.new_calls(),
    );

    let p = cuda.alloc_host(64 << 20).unwrap();
    compare.same_but_handles(&["cuMemAllocHost"]);
    cuda.free_host(p).unwrap();
    compare.same_but_handles(&["cuMemFreeHost"]);

    let kernel = cuda
        .kernel(".visible .entry spin_25us()", "spin_25us")
        .unwrap();
    let launcher = cuda.launcher().unwrap();
    for _ in 0..100 {
        launcher.launch(kernel, &mut []).unwrap();
    }
    cuda.synchronize().unwrap();
    compare.same(&["launch-ioctls"]);

    let state = sim.truth().unwrap();
    assert_eq!(state.bytes_of(0, std::process::id()), 520 << 20);
    let client = &state.clients[0];
    let groups: Vec<(u64, usize)> = client
        .groups
        .iter()
        .map(|group| (group.slice_us, group.channels.len()))
        .collect();
    assert_eq!(groups, [(2048, 8), (1024, 4), (1024, 4), (1024, 4)]);
    assert_eq!(client.groups[0].handle, 0x5c00_0015);
}
