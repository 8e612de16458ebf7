//! What a process costs, by `/proc`; the fields are those of `proc_pid_stat(5)`.

use std::{fs, io};

/// Cost of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// CPU time in user and kernel mode, in seconds.
    pub cpu_seconds: f64,
    /// Resident memory in bytes.
    pub resident_bytes: u64,
    /// Threads.
    pub threads: u64,
    /// Open descriptors.
    pub open_fds: u64,
    /// Start in seconds since 1970.
    pub start_time: f64,
}

/// Units of `/proc/PID/stat`.
#[derive(Clone, Copy, Debug)]
struct Units {
    ticks_per_second: f64,
    page: u64,
}

/// Cost of this process.
pub fn cost() -> io::Result<Cost> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "/proc/self/stat");
    // SAFETY: both only look up a number.
    let (ticks, page) = unsafe {
        (
            libc::sysconf(libc::_SC_CLK_TCK),
            libc::sysconf(libc::_SC_PAGESIZE),
        )
    };
    let units = Units {
        ticks_per_second: i32::try_from(ticks).map_or(100.0, f64::from),
        page: u64::try_from(page).unwrap_or(4096),
    };
    let stat = fs::read_to_string("/proc/self/stat")?;
    let boot = fs::read_to_string("/proc/stat")?
        .lines()
        .find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok())
        .ok_or_else(invalid)?;
    let open_fds = u64::try_from(fs::read_dir("/proc/self/fd")?.count()).unwrap_or(u64::MAX);
    parse(&stat, units, boot, open_fds).ok_or_else(invalid)
}

fn parse(stat: &str, units: Units, boot: f64, open_fds: u64) -> Option<Cost> {
    // The name is in parentheses and may hold anything; what follows the last one is numbers from field 3 on.
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_whitespace().collect();
    let float = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
    let integer = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    Some(Cost {
        cpu_seconds: (float(14)? + float(15)?) / units.ticks_per_second,
        threads: integer(20)?,
        start_time: boot + float(22)? / units.ticks_per_second,
        resident_bytes: integer(24)?.saturating_mul(units.page),
        open_fds,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_the_process_confuses_nobody() {
        let stat = "7 (a b) 1 2) S 1 7 7 0 -1 4194560 0 0 0 0 150 50 0 0 20 0 6 0 1000 99 25 18446744073709551615";
        let units = Units {
            ticks_per_second: 100.0,
            page: 4096,
        };
        let cost = parse(stat, units, 1e9, 3).expect("valid");
        let wanted = Cost {
            cpu_seconds: 2.0,
            resident_bytes: 25 * 4096,
            threads: 6,
            open_fds: 3,
            start_time: 1e9 + 10.0,
        };
        assert_eq!(cost, wanted);
        assert_eq!(parse("7 (x) S 1", units, 0.0, 0), None);
    }

    #[test]
    fn this_process_costs_something() {
        let cost = cost().expect("/proc");
        assert!(cost.resident_bytes > 1 << 16 && cost.threads > 0 && cost.open_fds > 0);
        assert!(cost.start_time > 1.6e9);
    }
}
