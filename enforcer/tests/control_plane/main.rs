//! Users talking to the daemon: the CLI and foreign clients, over the private socket and over a bus.

mod bus;
mod cli;
mod objects;
mod peer;
mod policy_files;
mod support;
mod top;
