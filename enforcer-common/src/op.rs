//! Ledger operations: arguments of the program `ledger_op`.
//!
//! User space never writes a usage field. It runs this program by `BPF_PROG_TEST_RUN` (raw tracepoint
//! programs take it since 5.10) with up to [`ARGS`] words, of which the first names the operation, and gets
//! one of [`result`] back.

/// Words of context that a raw tracepoint program may get.
pub const ARGS: usize = 12;

/// Reserve on behalf of a thread whose call waits for a decision:
/// `[ADMIT, thread, tenant, gpu, bytes, arg, cmd]`.
pub const ADMIT: u64 = 1;
/// Undo an admission whose call never came; if `at_ns` is not 0, only the one that was made then: `[CANCEL, thread, at_ns]`.
pub const CANCEL: u64 = 2;
/// Release an object and forget it; if `born_ns` is not 0, only the one that was made then:
/// `[RELEASE_OBJECT, client, handle, born_ns]`.
pub const RELEASE_OBJECT: u64 = 3;
/// Release what is left of an account and forget it: `[RELEASE_ACCOUNT, tgid, tenant, gpu]`.
pub const RELEASE_ACCOUNT: u64 = 4;
/// Give an object to another process and tenant: `[MOVE_OBJECT, client, handle, tgid, tenant, fd]`.
pub const MOVE_OBJECT: u64 = 5;
/// Note a process that was there before the observer: `[ADOPT_PROCESS, tgid, start_ns, tenant, cgroup]`.
pub const ADOPT_PROCESS: u64 = 6;
/// Take an object of such a process into the ledger, with its charge; one that is known stays as it is:
/// `[ADOPT_OBJECT, client, handle, tgid, tenant, gpu, kind, class, parent, fd, bytes, cgroup]`.
pub const ADOPT_OBJECT: u64 = 7;
/// Reserve memory for a tenant at a place; one caller at a time: `[RESERVE, tenant, place, bytes]`.
pub const RESERVE: u64 = 10;
/// Charge a process for what no call asks RM for, in place of what was charged before: what the driver takes by itself, or
/// with `managed` its managed memory. `above` is one of [`above`]:
/// `[CHARGE_APART, tgid, tenant, gpu, bytes, cgroup, above, managed]`.
pub const CHARGE_APART: u64 = 11;

/// What [`CHARGE_APART`] does where a limit is exceeded.
pub mod above {
    /// Charges all the same.
    pub const CHARGE: u64 = 0;
    /// Charges all the same, and reports a breach.
    pub const BREACH: u64 = 1;
    /// Charges nothing more, counts and reports a refusal, and answers [`super::result::DENIED`].
    pub const REFUSE: u64 = 2;
}

/// Count and report that a thread may have no managed memory: `[REFUSE_MANAGED, thread, tenant, gpu, bytes]`.
pub const REFUSE_MANAGED: u64 = 12;

/// Settle the last call of a thread that waits in its next one, if its exit was not seen: `[SETTLE, thread, tgid]`.
pub const SETTLE: u64 = 13;

/// Whether the open file at a kernel address still is an open control file: `[IS_OPEN, address]`.
pub const IS_OPEN: u64 = 8;
/// Whether a descriptor of the caller is the open file at a kernel address: `[IS_FILE, fd, address]`.
pub const IS_FILE: u64 = 9;

/// Results of an operation.
pub mod result {
    /// Done.
    pub const OK: u32 = 0;
    /// The budget does not allow it.
    pub const DENIED: u32 = 1;
    /// There is no such thing.
    pub const NOT_FOUND: u32 = 2;
    /// A map is full.
    pub const FULL: u32 = 3;
    /// Arguments out of range.
    pub const INVALID: u32 = 4;
    /// The budget does not allow it, and it is the second try of a refusal already reported.
    pub const DENIED_AGAIN: u32 = 5;
    /// The budget does not allow it now; the caller is to try again.
    pub const WAIT: u32 = 6;
    /// The last call of the thread is to be settled first.
    pub const UNSETTLED: u32 = 7;
}
