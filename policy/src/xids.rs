//! Which Xids a limit speaks of.

use std::fmt;

use crate::raw::{Mistake, Raw};
use crate::values::Setting;

/// The largest code that a list may have. The driver's own list ends far below.
const LARGEST: u32 = 511;
const WORDS: usize = 8;

/// A set of the driver's error codes (Xids).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Xids([u64; WORDS]);

impl Xids {
    /// The largest code that a set can have.
    pub const LARGEST: u32 = LARGEST;

    /// A set of these codes; those above [`Xids::LARGEST`] and 0 are left out.
    pub fn of(codes: impl IntoIterator<Item = u32>) -> Self {
        let mut set = Self::default();
        for code in codes
            .into_iter()
            .filter(|code| (1..=LARGEST).contains(code))
        {
            set.0[code as usize / 64] |= 1 << (code % 64);
        }
        set
    }

    /// Whether a code is in it.
    pub fn contains(&self, code: u32) -> bool {
        self.0
            .get(code as usize / 64)
            .is_some_and(|word| word & (1 << (code % 64)) != 0)
    }

    /// The codes, in order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (1..=LARGEST).filter(|code| self.contains(*code))
    }
}

impl Setting for Xids {
    fn read(raw: &Raw<'_>) -> Result<Self, Mistake> {
        let codes: Vec<Option<i64>> = match raw {
            Raw::Integers(codes) => codes.clone(),
            Raw::Integer(code) => vec![*code],
            // As `set-property` has it, and as it is printed.
            Raw::Text(text) => {
                let inside = text
                    .strip_prefix('[')
                    .and_then(|rest| rest.strip_suffix(']'))
                    .unwrap_or(text);
                if inside.trim().is_empty() {
                    Vec::new()
                } else {
                    inside
                        .split(',')
                        .map(|code| code.trim().parse().ok())
                        .collect()
                }
            }
            _ => return Err(Mistake::wrong_type(raw, Self::allowed())),
        };
        let mut good = Vec::with_capacity(codes.len());
        for code in codes {
            match code.and_then(|code| u32::try_from(code).ok()) {
                Some(code) if (1..=LARGEST).contains(&code) => good.push(code),
                _ => return Err(Mistake::new("it holds what is no Xid", Self::allowed())),
            }
        }
        Ok(Self::of(good))
    }

    fn write(&self) -> String {
        self.to_string()
    }

    fn allowed() -> String {
        format!("a list of Xids is integers from 1 to {LARGEST}, such as [13, 31]; [] is none")
    }
}

impl fmt::Display for Xids {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let codes: Vec<String> = self.iter().map(|code| code.to_string()).collect();
        write!(f, "[{}]", codes.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_in_every_form() {
        let wanted = Xids::of([13, 31]);
        for raw in [
            Raw::Integers(vec![Some(31), Some(13), Some(13)]),
            Raw::Text("13,31"),
            Raw::Text("[13, 31]"),
        ] {
            assert_eq!(Xids::read(&raw), Ok(wanted), "{raw:?}");
        }
        assert_eq!(Xids::read(&Raw::Integer(Some(79))), Ok(Xids::of([79])));
        assert_eq!(Xids::read(&Raw::Integers(Vec::new())), Ok(Xids::default()));
        assert_eq!(wanted.to_string(), "[13, 31]");
        assert_eq!(Xids::read(&Raw::Text("[]")), Ok(Xids::default()));
        let all = Xids::of(0..5000);
        assert!(
            all.contains(1)
                && all.contains(LARGEST)
                && !all.contains(0)
                && !all.contains(LARGEST + 1)
        );
        assert!(!all.contains(u32::MAX));
    }

    #[test]
    fn what_is_no_code_is_refused() {
        for raw in [
            Raw::Integers(vec![Some(0)]),
            Raw::Integers(vec![Some(512)]),
            Raw::Integers(vec![None]),
            Raw::Integer(Some(-1)),
            Raw::Text("13 31"),
            Raw::Text("all"),
            Raw::Boolean(true),
        ] {
            let mistake = Xids::read(&raw).expect_err("no list of Xids");
            assert!(mistake.help.contains("[13, 31]"), "{raw:?}");
        }
    }
}
