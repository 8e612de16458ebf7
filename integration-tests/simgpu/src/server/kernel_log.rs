//! What the driver would write to the kernel's log, in a file of the form of `/dev/kmsg`.

use std::fs::File;
use std::io::Write;
use std::time::Duration;

/// The file.
pub struct KernelLog {
    file: File,
    sequence: u64,
}

impl KernelLog {
    /// Writes to `file`.
    pub fn new(file: File) -> Self {
        Self { file, sequence: 0 }
    }

    /// A fault of a card: `NVRM: Xid (PCI:0000:41:00): 31, pid=4711, name=python3, Ch 00000010`.
    pub fn xid(&mut self, at: Duration, pci_bus: u8, code: u32, pid: Option<u32>) {
        let who = match pid {
            Some(pid) => format!("pid={pid}, name={}, Ch 00000010", name_of(pid)),
            None => "pid='<unknown>', name=<unknown>, x".to_owned(),
        };
        let text = format!("NVRM: Xid (PCI:0000:{pci_bus:02x}:00): {code}, {who}");
        let record = format!(
            "3,{},{},-;{}\n SUBSYSTEM=pci\n",
            self.sequence,
            at.as_micros(),
            escape(&text)
        );
        self.sequence += 1;
        if let Err(error) = self.file.write_all(record.as_bytes()) {
            eprintln!("simgpu: cannot write the kernel's log: {error}");
        }
    }
}

/// What a process calls itself, which may be anything in fifteen bytes.
fn name_of(pid: u32) -> String {
    let name = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    let name = name.strip_suffix(b"\n").unwrap_or(&name);
    String::from_utf8_lossy(name).into_owned()
}

/// The kernel writes what is no printable ASCII as `\xHH`.
fn escape(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'\\' | 0..=0x1f | 0x7f.. => format!("\\x{byte:02x}"),
            byte => char::from(byte).to_string(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_name_ends_a_record() {
        assert_eq!(escape("a\nb\\c\u{e9}d"), "a\\x0ab\\x5cc\\xc3\\xa9d");
    }
}
