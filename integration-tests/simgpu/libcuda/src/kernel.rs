//! Modules, functions and streams: the handles behind a launch.

use std::sync::Arc;

use crate::driver::{Context, Driver};
use crate::error::{self, CuResult};

/// What a kernel does in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Takes time, nanoseconds.
    Spin(u64),
    /// Takes as many nanoseconds as its first argument says.
    SpinFor,
    /// Takes a microsecond and touches the memory at its first argument.
    Touch,
}

/// A kernel, behind a `CUfunction`.
#[derive(Clone, Debug)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// What it does.
    pub effect: Effect,
}

/// A module, behind a `CUmodule`: the functions that its text defines.
///
/// The text is PTX, so that the same module works on a real GPU. The model reads the names of its entries:
/// `spin_25us` takes 25 µs, `spin_300ns` 300 ns, `spin_for` as many nanoseconds as its first argument says, `touch` uses the memory at its first argument, and any other
/// takes a microsecond.
pub struct Module {
    functions: Vec<Function>,
}

impl Module {
    /// Reads PTX.
    pub fn parse(text: &str) -> Result<Self, CuResult> {
        let functions: Vec<_> = text
            .split(".entry")
            .skip(1)
            .filter_map(|rest| {
                let name: String = rest
                    .trim_start()
                    .chars()
                    .take_while(|c| c.is_ascii_alphanumeric() || *c == '_')
                    .collect();
                (!name.is_empty()).then(|| Function {
                    effect: effect_of(&name),
                    name,
                })
            })
            .collect();
        if functions.is_empty() {
            return Err(error::INVALID_IMAGE);
        }
        Ok(Self { functions })
    }

    /// A function by name.
    pub fn get(&self, name: &str) -> Option<&Function> {
        self.functions.iter().find(|function| function.name == name)
    }
}

fn effect_of(name: &str) -> Effect {
    const DEFAULT_NS: u64 = 1000;
    if name == "touch" {
        return Effect::Touch;
    }
    if name == "spin_for" {
        return Effect::SpinFor;
    }
    let Some(length) = name.strip_prefix("spin_") else {
        return Effect::Spin(DEFAULT_NS);
    };
    let (number, scale) = if let Some(number) = length.strip_suffix("us") {
        (number, 1000)
    } else if let Some(number) = length.strip_suffix("ns") {
        (number, 1)
    } else if let Some(number) = length.strip_suffix("ms") {
        (number, 1_000_000)
    } else {
        return Effect::Spin(DEFAULT_NS);
    };
    Effect::Spin(
        number
            .parse::<u64>()
            .map_or(DEFAULT_NS, |number| number.saturating_mul(scale)),
    )
}

/// A stream, behind a `CUstream`.
pub struct Stream {
    /// Its context.
    pub context: Arc<Context>,
    /// Which of the context's compute channels it uses.
    pub channel: usize,
}

/// A moment in a stream, behind a `CUevent`.
#[derive(Default)]
pub struct Event {
    /// Context, channel and number of the kernel that it stands behind; none before it is recorded.
    pub point: Option<(Arc<Context>, usize, u64)>,
}

/// A graph of kernels, behind a `CUgraph` and, instantiated, a `CUgraphExec`.
#[derive(Clone, Default)]
pub struct Graph {
    /// The kernels in the order in which they were added, each with its first argument.
    pub nodes: Vec<(Function, u64)>,
}

/// Launches a kernel whose first argument is `argument`.
pub fn launch(
    driver: &Driver,
    context: &Context,
    channel: usize,
    function: &Function,
    argument: impl FnOnce() -> u64,
) -> Result<(), CuResult> {
    match function.effect {
        Effect::Spin(ns) => context.launcher.launch(channel, 1, ns),
        Effect::SpinFor => context.launcher.launch(channel, 1, argument()),
        Effect::Touch => {
            driver.memory.touch(driver, context.device, argument())?;
            context.launcher.launch(channel, 1, 1000)
        }
    }
}
