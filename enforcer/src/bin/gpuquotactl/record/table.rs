//! The rows of a recording, as comma-separated values.

use std::time::Duration;

/// The first line: the names of the columns.
pub const HEAD: &str =
    "time_seconds,gpu,tenant,gpu_percent,memory_bytes,memory_percent,power_watts\n";

/// What only the card has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rest {
    /// Part of the time in which memory was read or written.
    pub memory_percent: u32,
    /// What the board draws.
    pub power_mw: Option<u32>,
}

/// One look at a card, or at what one tenant has of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Since the start.
    pub at: Duration,
    /// GPU index.
    pub gpu: u32,
    /// Tenant; none for the card.
    pub tenant: Option<String>,
    /// Part of the time in which kernels ran.
    pub percent: Option<u32>,
    /// Bytes in use.
    pub memory: u64,
    /// Only for the card.
    pub rest: Option<Rest>,
}

impl Row {
    /// The row with its line end.
    pub fn line(&self) -> String {
        let number =
            |number: Option<u32>| number.map_or(String::new(), |number| number.to_string());
        let power = self.rest.and_then(|rest| rest.power_mw);
        format!(
            "{:.6},{},{},{},{},{},{}\n",
            self.at.as_secs_f64(),
            self.gpu,
            quoted(self.tenant.as_deref().unwrap_or_default()),
            number(self.percent),
            self.memory,
            number(self.rest.map(|rest| rest.memory_percent)),
            power.map_or(String::new(), |milliwatts| format!(
                "{:.3}",
                f64::from(milliwatts) / 1000.0
            )),
        )
    }
}

/// As RFC 4180 has it.
fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_as_many_columns_as_the_head() {
        let card = Row {
            at: Duration::from_micros(5_003),
            gpu: 1,
            tenant: None,
            percent: Some(97),
            memory: 7,
            rest: Some(Rest {
                memory_percent: 30,
                power_mw: Some(512_340),
            }),
        };
        assert_eq!(card.line(), "0.005003,1,,97,7,30,512.340\n");
        let tenant = Row {
            tenant: Some("a, \"b\"".into()),
            percent: None,
            rest: None,
            ..card
        };
        assert_eq!(tenant.line(), "0.005003,1,\"a, \"\"b\"\"\",,7,,\n");
        let commas = |text: &str| text.matches(',').count();
        assert_eq!(commas(HEAD), commas("0.005003,1,,97,7,30,512.340"));
    }
}
