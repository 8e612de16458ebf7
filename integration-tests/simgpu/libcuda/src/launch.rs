//! Launches: a queue that a thread of its own hands to the GPU.
//!
//! A launch makes no system call, as with the real library. The queue of a channel holds
//! [`QUEUE_DEPTH`] kernels; a launch beyond it waits until some are done.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use gpuquota_simgpu::side;

use crate::error::{self, CuResult};
use crate::rm;

/// Kernels that a channel takes before a launch blocks.
const QUEUE_DEPTH: u64 = 1024;
/// How many must finish before a launch that blocked goes on.
const QUEUE_LOW: u64 = QUEUE_DEPTH - 64;

#[derive(Default)]
struct ChannelState {
    handle: u32,
    submitted: u64,
    completed: u64,
}

#[derive(Default)]
struct Queue {
    channels: Vec<ChannelState>,
    /// Channel index, kernels, nanoseconds each.
    pending: VecDeque<(usize, u32, u64)>,
    error: CuResult,
    closed: bool,
    sleeping: bool,
}

impl Queue {
    /// An Xid that stopped a channel is an error of the context from then on.
    fn note_fault(&mut self, xid: u32) -> Result<(), CuResult> {
        match xid {
            0 => return Ok(()),
            // An MMU fault is the one that the API names.
            31 => self.error = error::ILLEGAL_ADDRESS,
            _ => self.error = error::LAUNCH_FAILED,
        }
        Err(self.error)
    }
}

/// The queue of one context.
pub struct Launcher {
    fd: RawFd,
    client: u32,
    queue: Mutex<Queue>,
    filled: Condvar,
    /// Held while entries travel to the GPU, so that they arrive in order.
    sending: Mutex<()>,
}

impl Launcher {
    /// A queue for the given channels, with its thread.
    pub fn start(fd: RawFd, client: u32, channels: &[u32]) -> Result<Arc<Self>, CuResult> {
        let launcher = Arc::new(Self {
            fd,
            client,
            queue: Mutex::new(Queue {
                channels: channels
                    .iter()
                    .map(|handle| ChannelState {
                        handle: *handle,
                        ..ChannelState::default()
                    })
                    .collect(),
                ..Queue::default()
            }),
            filled: Condvar::new(),
            sending: Mutex::new(()),
        });
        let worker = Arc::clone(&launcher);
        std::thread::Builder::new()
            .name("cuda-launch".into())
            .spawn(move || worker.run())
            .map_err(|_| error::OPERATING_SYSTEM)?;
        Ok(launcher)
    }

    /// Number of channels.
    pub fn channels(&self) -> usize {
        self.lock().channels.len()
    }

    /// Puts kernels into a channel's queue.
    pub fn launch(&self, channel: usize, kernels: u32, each_ns: u64) -> Result<(), CuResult> {
        let mut queue = self.lock();
        loop {
            if queue.error != error::SUCCESS {
                return Err(queue.error);
            }
            let state = queue.channels.get(channel).ok_or(error::INVALID_HANDLE)?;
            if queue.closed {
                return Err(error::INVALID_CONTEXT);
            }
            if state.submitted.saturating_sub(state.completed) < QUEUE_DEPTH {
                break;
            }
            let target = state.submitted - QUEUE_LOW;
            drop(queue);
            self.wait_for(channel, target)?;
            queue = self.lock();
        }
        queue.channels[channel].submitted += u64::from(kernels);
        match queue.pending.back_mut() {
            Some((last, count, ns)) if *last == channel && *ns == each_ns => {
                *count = count.saturating_add(kernels);
            }
            _ => queue.pending.push_back((channel, kernels, each_ns)),
        }
        if queue.sleeping {
            self.filled.notify_one();
        }
        Ok(())
    }

    /// Waits until a channel has done all that was launched so far.
    pub fn synchronize(&self, channel: usize) -> Result<(), CuResult> {
        let target = self.submitted(channel)?;
        self.wait_for(channel, target)
    }

    /// Waits until everything launched so far is done.
    pub fn synchronize_all(&self) -> Result<(), CuResult> {
        for channel in 0..self.channels() {
            self.synchronize(channel)?;
        }
        Ok(())
    }

    /// Number of the kernel launched last on a channel.
    pub fn submitted(&self, channel: usize) -> Result<u64, CuResult> {
        self.lock()
            .channels
            .get(channel)
            .map(|state| state.submitted)
            .ok_or(error::INVALID_HANDLE)
    }

    /// Puts a kernel of no length into the queue, whose end is a moment to ask for; returns its number.
    pub fn mark(&self, channel: usize) -> Result<u64, CuResult> {
        self.launch(channel, 1, side::MARK_NS)?;
        self.submitted(channel)
    }

    /// When a mark was reached, nanoseconds of the model's clock.
    pub fn time_of(&self, channel: usize, number: u64) -> Result<u64, CuResult> {
        self.flush()?;
        let handle = self.handle(channel)?;
        match rm::wait(self.fd, self.client, handle, number) {
            Ok(answer) if answer.completed >= number => Ok(answer.finished_ns),
            Ok(_) => Err(error::NOT_READY),
            Err(_) => Err(error::OPERATING_SYSTEM),
        }
    }

    /// Whether a kernel is done.
    pub fn is_done(&self, channel: usize, number: u64) -> Result<bool, CuResult> {
        self.flush()?;
        if self.completed(channel)? >= number {
            return Ok(true);
        }
        self.ask(channel, 0)?;
        Ok(self.completed(channel)? >= number)
    }

    /// Waits for a kernel.
    pub fn wait_for(&self, channel: usize, number: u64) -> Result<(), CuResult> {
        self.flush()?;
        loop {
            let queue = self.lock();
            if queue.error != error::SUCCESS {
                return Err(queue.error);
            }
            let state = queue.channels.get(channel).ok_or(error::INVALID_HANDLE)?;
            if state.completed >= number {
                return Ok(());
            }
            drop(queue);
            self.ask(channel, number)?;
        }
    }

    /// Ends the thread.
    pub fn close(&self) {
        self.lock().closed = true;
        self.filled.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn completed(&self, channel: usize) -> Result<u64, CuResult> {
        let queue = self.lock();
        if queue.error != error::SUCCESS {
            return Err(queue.error);
        }
        queue
            .channels
            .get(channel)
            .map(|state| state.completed)
            .ok_or(error::INVALID_HANDLE)
    }

    fn handle(&self, channel: usize) -> Result<u32, CuResult> {
        self.lock()
            .channels
            .get(channel)
            .map(|state| state.handle)
            .ok_or(error::INVALID_HANDLE)
    }

    /// Asks the GPU how far a channel is, waiting a while for kernel `number`.
    fn ask(&self, channel: usize, number: u64) -> Result<(), CuResult> {
        let handle = self.handle(channel)?;
        let answer = rm::wait(self.fd, self.client, handle, number);
        let mut queue = self.lock();
        let Ok(answer) = answer else {
            queue.error = error::OPERATING_SYSTEM;
            return Err(queue.error);
        };
        let state = &mut queue.channels[channel];
        state.completed = state.completed.max(answer.completed);
        queue.note_fault(answer.fault)
    }

    /// Hands over everything that is pending.
    fn flush(&self) -> Result<(), CuResult> {
        let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let mut queue = self.lock();
            if queue.pending.is_empty() {
                return Ok(());
            }
            let take = queue.pending.len().min(side::submit::MAX);
            let batch: Vec<_> = queue.pending.drain(..take).collect();
            let entries: Vec<_> = batch
                .iter()
                .map(|(channel, kernels, ns)| (queue.channels[*channel].handle, *kernels, *ns))
                .collect();
            drop(queue);
            let answer = rm::submit(self.fd, self.client, &entries);
            let mut queue = self.lock();
            let Ok((completed, fault)) = answer else {
                queue.error = error::OPERATING_SYSTEM;
                return Err(queue.error);
            };
            for ((channel, _, _), completed) in batch.iter().zip(completed) {
                let state = &mut queue.channels[*channel];
                state.completed = state.completed.max(completed);
            }
            queue.note_fault(fault)?;
        }
    }

    fn run(&self) {
        loop {
            let mut queue = self.lock();
            while queue.pending.is_empty() && !queue.closed {
                queue.sleeping = true;
                queue = self
                    .filled
                    .wait(queue)
                    .unwrap_or_else(PoisonError::into_inner);
                queue.sleeping = false;
            }
            if queue.closed {
                return;
            }
            drop(queue);
            // An error is kept in the queue, where the next call finds it.
            let _ = self.flush();
        }
    }
}
