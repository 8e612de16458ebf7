//! What the driver writes about a fault, read strictly.
//!
//! A line of it is `NVRM: Xid (PCI:0000:41:00): 31, pid=4711, name=python3, Ch 00000010, …`. The name is the tenant's to choose
//! and may hold anything, another `pid=` and line ends too; so everything is taken from where it has to stand and from
//! nowhere else, and what stands after the process id is text. In the kernel's log only the kernel itself writes with
//! facility 0: what user space puts there has another.

use std::{fmt, str::FromStr};

use super::{Device, Fault};

/// How a line of the driver about a fault begins.
const PREFIX: &str = "NVRM: Xid (PCI:";

/// Where a GPU is on the bus. The function is left out: GPUs are function 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// Domain.
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device.
    pub device: u8,
}

/// A text is no PCI address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no PCI address such as 0000:41:00")]
pub struct NoAddress;

impl FromStr for PciAddress {
    type Err = NoAddress;

    /// `0000:41:00`, with `.0` or without, with a domain of up to eight digits as NVML has it.
    fn from_str(text: &str) -> Result<Self, NoAddress> {
        let text = text.strip_suffix(".0").unwrap_or(text);
        let mut parts = text.split(':');
        let mut next = |longest: usize| {
            parts
                .next()
                .filter(|part| (1..=longest).contains(&part.len()))
                .filter(|part| part.bytes().all(|byte| byte.is_ascii_hexdigit()))
                .and_then(|part| u32::from_str_radix(part, 16).ok())
                .ok_or(NoAddress)
        };
        let address = Self {
            domain: next(8)?,
            bus: u8::try_from(next(2)?).map_err(|_| NoAddress)?,
            device: u8::try_from(next(2)?).map_err(|_| NoAddress)?,
        };
        match parts.next() {
            None => Ok(address),
            Some(_) => Err(NoAddress),
        }
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:04x}:{:02x}:{:02x}",
            self.domain, self.bus, self.device
        )
    }
}

/// The process that a message of the driver begins with: `pid=4711, …`. `pid='<unknown>'` and everything else is none.
pub fn process(message: &str) -> Option<u32> {
    let rest = message.strip_prefix("pid=")?;
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    let (number, after) = rest.split_at(digits);
    if !(after.is_empty() || after.starts_with(',')) {
        return None;
    }
    number.parse().ok().filter(|pid| *pid != 0)
}

/// A fault from the fields of the tracepoint.
pub fn from_fields(device: &str, xid: u32, message: &str) -> Option<Fault> {
    Some(Fault {
        device: Device::Pci(device.parse().ok()?),
        xid,
        pid: process(message),
        text: message.to_owned(),
    })
}

/// A fault from a record of `/dev/kmsg`: `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS…;TEXT`. `None` for everything else, and for
/// what the kernel itself did not write.
pub fn from_record(record: &str) -> Option<Fault> {
    let (head, text) = record.split_once(';')?;
    let priority: u32 = head.split(',').next()?.parse().ok()?;
    // The facility is above three bits of level, and 0 is the kernel's.
    if priority >> 3 != 0 {
        return None;
    }
    from_line(text)
}

/// A fault from a line of the driver.
fn from_line(line: &str) -> Option<Fault> {
    let rest = line.strip_prefix(PREFIX)?;
    let (device, rest) = rest.split_once("): ")?;
    let device: PciAddress = device.parse().ok()?;
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    let (xid, after) = rest.split_at(digits);
    let text = match after.strip_prefix(", ") {
        Some(text) => text,
        None if after.is_empty() => "",
        None => return None,
    };
    Some(Fault {
        device: Device::Pci(device),
        xid: xid.parse().ok()?,
        pid: process(text),
        text: text.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEAD: &str = "3,1029,8234567,-;";

    fn pci(text: &str) -> PciAddress {
        text.parse().expect("an address")
    }

    #[test]
    fn addresses_of_all_who_write_them() {
        assert_eq!(pci("0000:41:00"), pci("00000000:41:00.0"));
        assert_eq!(pci("10000:e1:1f.0").to_string(), "10000:e1:1f");
        for text in [
            "",
            "41:00",
            "0000:41:00.1",
            "0000:41:0x",
            "0000:141:00",
            "0000:41:00:00",
            "0000:+1:00",
            "000000000:41:00",
        ] {
            assert_eq!(text.parse::<PciAddress>(), Err(NoAddress), "{text}");
        }
    }

    #[test]
    fn lines_of_the_driver() {
        let line = format!(
            "{HEAD}NVRM: Xid (PCI:0000:41:00): 31, pid=79749, name=python3, Ch 0000000a, intr 00000000. MMU Fault"
        );
        let fault = from_record(&line).expect("a fault");
        assert_eq!((fault.xid, fault.pid), (31, Some(79_749)));
        assert_eq!(fault.device, Device::Pci(pci("0000:41:00")));
        assert!(
            fault
                .text
                .starts_with("pid=79749, name=python3, Ch 0000000a")
        );
        for (text, xid, pid) in [
            (
                "NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
                79,
                None,
            ),
            (
                "NVRM: Xid (PCI:0000:41:00): 79, pid=<unknown>, name=<unknown>, x",
                79,
                None,
            ),
            (
                "NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.",
                79,
                None,
            ),
            (
                "NVRM: Xid (PCI:0000:01:00): 79, pid=1122, GPU has fallen off the bus.",
                79,
                Some(1122),
            ),
            ("NVRM: Xid (PCI:0000:01:00): 43, pid=7", 43, Some(7)),
            ("NVRM: Xid (PCI:0000:01:00): 43", 43, None),
        ] {
            let fault = from_record(&format!("{HEAD}{text}")).expect(text);
            assert_eq!((fault.xid, fault.pid), (xid, pid), "{text}");
        }
    }

    #[test]
    fn what_only_looks_like_one_is_none() {
        for record in [
            // User space through /dev/kmsg: its facility is 1 or what it likes, never the kernel's.
            "12,9,9,-;NVRM: Xid (PCI:0000:41:00): 31, pid=1, name=x",
            "131,9,9,-;NVRM: Xid (PCI:0000:41:00): 31, pid=1, name=x",
            // A program of that name that crashes.
            "6,9,9,-;NVRM: Xid (PCI:[4711]: segfault at 0 ip 0 sp 0 error 4",
            "6,9,9,-;x: NVRM: Xid (PCI:0000:41:00): 31, pid=1, name=x",
            "6,9,9,-; NVRM: Xid (PCI:0000:41:00): 31, pid=1, name=x",
            "6,9,9,-;NVRM: Xid (PCI:0000:41:00): 31 pid=1",
            "6,9,9,-;NVRM: Xid (PCI:0000:41:00): -31, pid=1",
            "6,9,9,-;NVRM: Xid (PCI:0000:41:00.1): 31, pid=1",
            "6,9,9,-;NVRM: Xid (PCI:0000:41:00): 99999999999, pid=1",
            " DEVICE=+pci:0000:41:00.0",
            "NVRM: Xid (PCI:0000:41:00): 31, pid=1, name=x",
            "",
            ";",
        ] {
            assert_eq!(from_record(record), None, "{record}");
        }
    }

    #[test]
    fn a_name_accuses_nobody_else() {
        // A process may call itself what it likes, in fifteen characters; the kernel's log escapes line ends.
        for name in ["x, pid=1", "\\x0aNVRM: Xid", "pid=1, name=y", "a\nb"] {
            let record = format!(
                "{HEAD}NVRM: Xid (PCI:0000:41:00): 13, pid=4711, name={name}, Graphics Exception"
            );
            assert_eq!(
                from_record(&record).expect("a fault").pid,
                Some(4711),
                "{name}"
            );
        }
        for name in ["x, pid=1", "pid=1,"] {
            let record =
                format!("{HEAD}NVRM: Xid (PCI:0000:41:00): 13, pid='<unknown>', name={name}, x");
            assert_eq!(from_record(&record).expect("a fault").pid, None, "{name}");
        }
        assert_eq!(process("pid=12x, name=y"), None);
        assert_eq!(process("pid=0, name=y"), None);
        assert_eq!(process(" pid=12, name=y"), None);
    }

    proptest! {
        /// Whatever a process calls itself and whatever follows: the process is the one that the driver named.
        #[test]
        fn no_name_changes_the_process(pid in 1u32.., name in ".{0,15}", rest in ".{0,60}") {
            let text = format!("pid={pid}, name={name}, {rest}");
            let fault = from_fields("0000:41:00.0", 31, &text).expect("a fault");
            prop_assert_eq!(fault.pid, Some(pid));
            let record = format!("{HEAD}NVRM: Xid (PCI:0000:41:00): 31, {text}");
            prop_assert_eq!(from_record(&record).expect("a fault").pid, Some(pid));
        }

        /// What the kernel did not write says nothing.
        #[test]
        fn nothing_but_the_kernel_is_believed(priority in 8u32.., text in ".{0,60}") {
            let record = format!("{priority},1,1,-;NVRM: Xid (PCI:0000:41:00): 31, pid=1, {text}");
            prop_assert_eq!(from_record(&record), None);
        }

        /// No text is a panic.
        #[test]
        fn odd_text_is_nothing(text in ".*") {
            let _ = from_record(&text);
            let _ = from_fields(&text, 1, &text);
            let _ = process(&text);
        }
    }
}
