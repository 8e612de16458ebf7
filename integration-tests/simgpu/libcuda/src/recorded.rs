//! The recorded call sequences of `cuInit` and of a context, which this library repeats.
//!
//! They are what `traces/` holds, one call a line: the file (`ctl`, `gpu`, `uvm`), the call, its object and
//! the handle that it makes. Only what the model acts on is filled in when a line is repeated.

use crate::error::{self, CuResult};

/// `cuInit`, what is done once.
pub const INIT: &str = include_str!("recorded/init.txt");
/// `cuInit`, what is done for each GPU.
pub const GPU: &str = include_str!("recorded/gpu.txt");
/// `cuDevicePrimaryCtxRetain`.
pub const CONTEXT: &str = include_str!("recorded/context.txt");

/// An object in a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ref {
    /// The client.
    Client,
    /// A handle as it was recorded.
    Handle(u32),
}

/// One recorded call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Makes the client.
    Client,
    /// `RM_ALLOC`; on a GPU's file if `gpu`.
    Alloc {
        gpu: bool,
        class: u32,
        parent: Ref,
        new: u32,
        memory: Option<Memory>,
    },
    /// Legacy allocation of pinned host memory.
    Legacy { parent: Ref, new: u32, size: u64 },
    /// `RM_FREE`.
    Free(Ref),
    /// `RM_CONTROL`.
    Control { cmd: u32, object: Ref },
    /// Any other escape.
    Escape { gpu: bool, number: u8, size: usize },
    /// A UVM command.
    Uvm(u32),
}

/// Parameters of a recorded memory object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub size: u64,
    pub attr: u32,
    pub attr2: u32,
    pub flags: u32,
    pub kind: u32,
}

/// Reads a recording.
pub fn parse(text: &str) -> Result<Vec<Call>, CuResult> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| parse_line(line).ok_or(error::UNKNOWN))
        .collect()
}

fn hex(word: &str) -> Option<u32> {
    u32::from_str_radix(word.trim_start_matches("0x"), 16).ok()
}

fn reference(word: &str) -> Option<Ref> {
    if word == "client" {
        Some(Ref::Client)
    } else {
        hex(word).map(Ref::Handle)
    }
}

fn parse_line(line: &str) -> Option<Call> {
    let words: Vec<&str> = line.split(' ').collect();
    let field = |name: &str| {
        words
            .iter()
            .find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    };
    match words[..] {
        ["ctl", "client"] => Some(Call::Client),
        ["uvm", cmd] => hex(cmd).map(Call::Uvm),
        ["ctl", "free", object] => reference(object).map(Call::Free),
        ["ctl", "control", cmd, object] => Some(Call::Control {
            cmd: hex(cmd)?,
            object: reference(object)?,
        }),
        [file, "escape", number, size] => Some(Call::Escape {
            gpu: file == "gpu",
            number: u8::try_from(hex(number)?).ok()?,
            size: size.parse().ok()?,
        }),
        ["gpu", "legacy", _, parent, new, _] => Some(Call::Legacy {
            parent: reference(parent)?,
            new: hex(new)?,
            size: field("size")?.parse().ok()?,
        }),
        [file, "alloc", class, parent, new, ..] => Some(Call::Alloc {
            gpu: file == "gpu",
            class: hex(class)?,
            parent: reference(parent)?,
            new: hex(new)?,
            memory: match field("size") {
                None => None,
                Some(size) => Some(Memory {
                    size: size.parse().ok()?,
                    attr: hex(field("attr")?)?,
                    attr2: hex(field("attr2")?)?,
                    flags: hex(field("flags")?)?,
                    kind: hex(field("type")?)?,
                }),
            },
        }),
        _ => None,
    }
}
