//! The values of the launch profile: how much longer than usual is an anomaly, and what looking for it may cost.

use std::fmt;

use crate::raw::{Mistake, Raw};
use crate::values::{Decimal, Setting, decimal, percentage};

/// How many times as much as usual, from 1.01 to 1000, in steps of 0.01.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Factor {
    hundredths: u32,
}

impl Factor {
    /// What holds where nothing is said: 3.
    pub const DEFAULT: Self = Self { hundredths: 300 };

    /// From hundredths. None outside 101..=100000.
    pub fn from_hundredths(hundredths: u32) -> Option<Self> {
        (101..=100_000)
            .contains(&hundredths)
            .then_some(Self { hundredths })
    }

    /// As a number.
    pub fn get(self) -> f64 {
        f64::from(self.hundredths) / 100.0
    }
}

impl Setting for Factor {
    fn read(raw: &Raw<'_>) -> Result<Self, Mistake> {
        let out_of_range = || Mistake::new("it is out of range", Self::allowed());
        match raw {
            Raw::Integer(number) => number
                .and_then(|number| u32::try_from(number).ok()?.checked_mul(100))
                .and_then(Self::from_hundredths)
                .ok_or_else(out_of_range),
            Raw::Float(text) => match hundredths(text) {
                Some((hundredths, true)) => {
                    Self::from_hundredths(hundredths).ok_or_else(out_of_range)
                }
                Some((_, false)) => Err(Mistake::new("it is finer than 0.01", Self::allowed())),
                None => Err(out_of_range()),
            },
            Raw::Text(text) if hundredths(text).is_some() => Err(Mistake::new(
                "a number stands without quotes",
                format!("write {text}; {}", Self::allowed()),
            )),
            _ => Err(Mistake::wrong_type(raw, Self::allowed())),
        }
    }

    fn write(&self) -> String {
        self.to_string()
    }

    fn allowed() -> String {
        "a factor is a number from 1.01 to 1000, such as 3 or 2.5".to_owned()
    }
}

impl fmt::Display for Factor {
    /// As in the policy file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        decimal(f, self.hundredths)
    }
}

/// A part of the time of a process, from 0.01 % to 100 %, in steps of 0.01 %.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Share {
    basis_points: u16,
}

impl Share {
    /// What holds where nothing is said: 1 %.
    pub const DEFAULT: Self = Self { basis_points: 100 };

    /// From hundredths of a percent. None outside 1..=10000.
    pub fn from_basis_points(basis_points: u16) -> Option<Self> {
        (1..=10_000)
            .contains(&basis_points)
            .then_some(Self { basis_points })
    }

    /// As a ratio from 0 to 1.
    pub fn ratio(self) -> f64 {
        f64::from(self.basis_points) / 10_000.0
    }
}

impl Setting for Share {
    fn read(raw: &Raw<'_>) -> Result<Self, Mistake> {
        percentage(raw, Self::from_basis_points)
    }

    fn write(&self) -> String {
        format!("\"{self}\"")
    }

    fn allowed() -> String {
        "a share is a string such as \"1%\" or \"0.25%\", from \"0.01%\" to \"100%\"".to_owned()
    }
}

impl fmt::Display for Share {
    /// As in the policy file, without quotes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        decimal(f, self.basis_points.into())?;
        f.write_str("%")
    }
}

/// A number in hundredths, and whether it is no finer than that.
fn hundredths(text: &str) -> Option<(u32, bool)> {
    let (number, rest) = Decimal::split(text)?;
    let (found, whole) = number.times(100).filter(|_| rest.is_empty())?;
    Some((u32::try_from(found).ok()?, whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors() {
        let read = |raw| Factor::read(&raw).ok().map(|factor| factor.to_string());
        assert_eq!(read(Raw::Integer(Some(3))).as_deref(), Some("3"));
        assert_eq!(read(Raw::Float("2.50")).as_deref(), Some("2.5"));
        assert_eq!(read(Raw::Float("1.01")).as_deref(), Some("1.01"));
        assert_eq!(read(Raw::Integer(Some(1000))).as_deref(), Some("1000"));
        for bad in [
            Raw::Integer(Some(1)),
            Raw::Integer(Some(0)),
            Raw::Integer(Some(-3)),
            Raw::Integer(Some(1001)),
            Raw::Integer(Some(i64::MAX)),
            Raw::Integer(None),
            Raw::Float("1.0"),
            Raw::Float("1.005"),
            Raw::Float("1e3"),
            Raw::Float("nan"),
            Raw::Text("3"),
            Raw::Text("3x"),
            Raw::Boolean(true),
        ] {
            let mistake = Factor::read(&bad).expect_err("no factor");
            assert!(mistake.help.contains("from 1.01 to 1000"), "{bad:?}");
        }
        assert!((Factor::DEFAULT.get() - 3.0).abs() < f64::EPSILON);
    }

    #[test]
    fn shares() {
        let read = |text| {
            Share::read(&Raw::Text(text))
                .ok()
                .map(|share| share.to_string())
        };
        assert_eq!(read("1%").as_deref(), Some("1%"));
        assert_eq!(read("0.01 %").as_deref(), Some("0.01%"));
        assert_eq!(read("12.50%").as_deref(), Some("12.5%"));
        assert_eq!(read("100%").as_deref(), Some("100%"));
        for bad in [
            "", "1", "0%", "0.001%", "0.005%", "101%", "1e3%", "-1%", "1pct",
        ] {
            assert_eq!(read(bad), None, "{bad}");
        }
        for bad in [
            Raw::Float("0.01"),
            Raw::Integer(Some(1)),
            Raw::Boolean(true),
        ] {
            assert!(Share::read(&bad).is_err(), "{bad:?}");
        }
        assert!((Share::DEFAULT.ratio() - 0.01).abs() < 1e-12);
    }
}
