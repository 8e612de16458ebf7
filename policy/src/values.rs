//! The values that limits can have, with their units.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::diagnostic::quote;
use crate::raw::{Mistake, Raw};
use crate::suggest::nearest;

/// A type that a key can have: how it is read, written and described.
pub(crate) trait Setting: Sized {
    /// Takes the value as written.
    fn read(raw: &Raw<'_>) -> Result<Self, Mistake>;
    /// The TOML text that reads back as the same value.
    fn write(&self) -> String;
    /// What is allowed, for messages: a clause without a full stop.
    fn allowed() -> String;
}

/// A limit that may be absent: `"max"` in the file, as in cgroup v2.
///
/// A tenant writes `"max"` to lift a limit that its class has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Limit<T> {
    /// This much.
    At(T),
    /// No limit.
    Max,
}

impl<T: Copy> Limit<T> {
    /// The limit, or None if there is none.
    pub fn get(self) -> Option<T> {
        match self {
            Self::At(value) => Some(value),
            Self::Max => None,
        }
    }
}

impl<T: Setting> Setting for Limit<T> {
    fn read(raw: &Raw<'_>) -> Result<Self, Mistake> {
        if let Raw::Text("max") = raw {
            return Ok(Self::Max);
        }
        T::read(raw).map(Self::At).map_err(|mistake| match raw {
            Raw::Text(text)
                if nearest(text, ["max", "infinity", "unlimited", "none"]).is_some() =>
            {
                Mistake::new(mistake.what, "write \"max\" for no limit")
            }
            _ => Mistake::new(
                mistake.what,
                format!("{}, or \"max\" for no limit", mistake.help),
            ),
        })
    }

    fn write(&self) -> String {
        match self {
            Self::At(value) => value.write(),
            Self::Max => "\"max\"".to_owned(),
        }
    }

    fn allowed() -> String {
        format!("{}, or \"max\" for no limit", T::allowed())
    }
}

/// A number with a decimal fraction, kept exact: `mantissa / 10^decimals`.
#[derive(Clone, Copy)]
pub(crate) struct Decimal {
    mantissa: u128,
    decimals: u32,
}

impl Decimal {
    /// Splits `text` into a leading number and what follows, spaces between them dropped. None without a number, or when
    /// it has more than 18 digits before or 9 after the point.
    pub(crate) fn split(text: &str) -> Option<(Self, &str)> {
        let end = text
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let (whole, fraction) = match number.split_once('.') {
            Some((whole, fraction)) if !fraction.is_empty() => (whole, fraction),
            Some(_) => return None,
            None => (number, ""),
        };
        if whole.is_empty() || whole.len() > 20 || fraction.len() > 9 || fraction.contains('.') {
            return None;
        }
        let mantissa = format!("{whole}{fraction}").parse().ok()?;
        let decimals = u32::try_from(fraction.len()).ok()?;
        Some((Self { mantissa, decimals }, unit.trim_start_matches(' ')))
    }

    /// The number times `unit`, and whether it came out whole. None if it does not fit.
    pub(crate) fn times(self, unit: u64) -> Option<(u64, bool)> {
        let scaled = self.mantissa.checked_mul(u128::from(unit))?;
        let divisor = 10u128.pow(self.decimals);
        Some((u64::try_from(scaled / divisor).ok()?, scaled % divisor == 0))
    }
}

const NOT_A_NUMBER: &str = "it does not start with a number";

/// Names of units that are near to `given`, as a hint before the list of what is allowed.
fn unit_help<'a>(
    number: &str,
    given: &str,
    units: impl IntoIterator<Item = &'a str>,
    allowed: String,
) -> String {
    match nearest(given, units) {
        Some(unit) => format!("did you mean \"{number}{unit}\"? {allowed}"),
        None => allowed,
    }
}

fn number_part(text: &str) -> &str {
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    &text[..end]
}

/// An amount of memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(pub u64);

impl Size {
    const UNITS: [(&str, u64); 10] = [
        ("B", 1),
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
        ("kB", 1_000),
        ("KB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("TB", 1_000_000_000_000),
    ];
}

impl Setting for Size {
    fn read(raw: &Raw<'_>) -> Result<Self, Mistake> {
        let text = match raw {
            Raw::Text(text) => *text,
            Raw::Integer(Some(bytes)) => {
                return u64::try_from(*bytes)
                    .map(Self)
                    .map_err(|_| Mistake::new("a size is not negative", Self::allowed()));
            }
            Raw::Integer(None) => {
                return Err(Mistake::new("it does not fit in 64 bits", Self::allowed()));
            }
            Raw::Float(float) => {
                return Err(Mistake::new(
                    "a number with a fraction needs a unit",
                    format!(
                        "write \"{float}GiB\" or the number of bytes; {}",
                        Self::allowed()
                    ),
                ));
            }
            Raw::Boolean(_) | Raw::Integers(_) | Raw::Other(_) => {
                return Err(Mistake::wrong_type(raw, Self::allowed()));
            }
        };
        let Some((number, unit)) = Decimal::split(text) else {
            return Err(Mistake::new(
                format!("{NOT_A_NUMBER} that a size can have"),
                Self::allowed(),
            ));
        };
        let shown = number_part(text);
        if unit.is_empty() {
            let help = if number.decimals == 0 {
                format!(
                    "write {shown} without quotes for bytes, or \"{shown}GiB\"; {}",
                    Self::allowed()
                )
            } else {
                Self::allowed()
            };
            return Err(Mistake::new("the unit is missing", help));
        }
        let Some((_, factor)) = Self::UNITS.into_iter().find(|(name, _)| *name == unit) else {
            let letters: Vec<char> = unit.chars().collect();
            let help = match letters[..] {
                ['k' | 'K' | 'M' | 'G' | 'T' | 'm' | 'g' | 't']
                | ['k' | 'K' | 'M' | 'G' | 'T', 'i'] => {
                    let letter = letters[0].to_ascii_uppercase();
                    format!(
                        "write \"{shown}{letter}iB\" (powers of 1024) or \"{shown}{letter}B\" (powers of 1000)"
                    )
                }
                _ => unit_help(
                    shown,
                    unit,
                    Self::UNITS.iter().map(|(name, _)| *name),
                    Self::allowed(),
                ),
            };
            return Err(Mistake::new(format!("unknown unit {}", quote(unit)), help));
        };
        match number.times(factor) {
            Some((bytes, _)) => Ok(Self(bytes)),
            None => Err(Mistake::new("it does not fit in 64 bits", Self::allowed())),
        }
    }

    fn write(&self) -> String {
        let bytes = self.0;
        let whole = |(name, factor): (&str, u64)| {
            (factor > 1 && bytes > 0 && bytes.is_multiple_of(factor))
                .then(|| format!("\"{}{name}\"", bytes / factor))
        };
        // Binary units first: GPUs allocate in powers of two.
        [
            ("TiB", 1 << 40),
            ("GiB", 1 << 30),
            ("MiB", 1 << 20),
            ("GB", 1_000_000_000),
            ("MB", 1_000_000),
            ("KiB", 1 << 10),
        ]
        .into_iter()
        .find_map(whole)
        // TOML's integers are signed.
        .unwrap_or_else(|| {
            if bytes > i64::MAX as u64 {
                format!("\"{bytes}B\"")
            } else {
                bytes.to_string()
            }
        })
    }

    fn allowed() -> String {
        "a size is a string such as \"40GiB\" (B, KiB, MiB, GiB, TiB: powers of 1024; kB, MB, GB, TB: powers of 1000) or a whole number of bytes"
            .to_owned()
    }
}

impl fmt::Display for Size {
    /// As in the policy file, without quotes; a bare number is bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.write().trim_matches('"'))
    }
}

/// The time that a [`Rate`] counts over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RateUnit {
    /// `/s`
    Second,
    /// `/min`
    Minute,
    /// `/h`
    Hour,
}

impl RateUnit {
    const ALL: [Self; 3] = [Self::Second, Self::Minute, Self::Hour];

    /// Its length in seconds.
    pub const fn seconds(self) -> u64 {
        match self {
            Self::Second => 1,
            Self::Minute => 60,
            Self::Hour => 3600,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Second => "s",
            Self::Minute => "min",
            Self::Hour => "h",
        }
    }
}

/// So many events in a second, minute or hour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rate {
    count: u64,
    unit: RateUnit,
}

impl Rate {
    /// The highest rate, in events per second.
    pub const MAX_PER_SECOND: u64 = 1_000_000_000;

    const FACTORS: [(&str, u64); 4] = [
        ("k", 1_000),
        ("K", 1_000),
        ("M", 1_000_000),
        ("G", 1_000_000_000),
    ];

    /// A rate from its parts. None if `count` is 0, or if it is above [`Self::MAX_PER_SECOND`].
    pub fn new(count: u64, unit: RateUnit) -> Option<Self> {
        (count > 0 && count <= Self::MAX_PER_SECOND * unit.seconds())
            .then_some(Self { count, unit })
    }

    /// Events in one [`Self::unit`].
    pub const fn count(self) -> u64 {
        self.count
    }

    /// The time that [`Self::count`] counts over.
    pub const fn unit(self) -> RateUnit {
        self.unit
    }

    /// Events per second; not exact for minutes and hours.
    #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
    pub fn per_second(self) -> f64 {
        self.count as f64 / self.unit.seconds() as f64
    }

    /// Nanoseconds for `events` of them, rounded up, so that a pacer that uses it never exceeds the rate.
    pub fn nanos_for(self, events: u64) -> u64 {
        let nanos = u128::from(events) * u128::from(self.unit.seconds()) * 1_000_000_000;
        u64::try_from(nanos.div_ceil(u128::from(self.count))).unwrap_or(u64::MAX)
    }

    /// How many events this rate gives in `nanos`, rounded down.
    pub fn events_in(self, nanos: u64) -> u64 {
        let events = u128::from(self.count) * u128::from(nanos)
            / (u128::from(self.unit.seconds()) * 1_000_000_000);
        u64::try_from(events).unwrap_or(u64::MAX)
    }
}

impl Setting for Rate {
    fn read(raw: &Raw<'_>) -> Result<Self, Mistake> {
        let text = match raw {
            Raw::Text(text) => *text,
            Raw::Integer(Some(number)) => {
                return Err(Mistake::new(
                    "the unit is missing",
                    format!("write \"{number}/s\"; {}", Self::allowed()),
                ));
            }
            _ => return Err(Mistake::wrong_type(raw, Self::allowed())),
        };
        let Some((number, rest)) = Decimal::split(text) else {
            return Err(Mistake::new(
                format!("{NOT_A_NUMBER} that a rate can have"),
                Self::allowed(),
            ));
        };
        let shown = number_part(text);
        let Some((factor, unit)) = rest.split_once('/') else {
            let help = format!("write \"{shown}{rest}/s\"; {}", Self::allowed());
            return Err(Mistake::new(
                "the time unit is missing",
                if rest.len() <= 1 {
                    help
                } else {
                    Self::allowed()
                },
            ));
        };
        let factor = factor.trim_end_matches(' ');
        let times = if factor.is_empty() {
            1
        } else if let Some((_, times)) = Self::FACTORS.into_iter().find(|(name, _)| *name == factor)
        {
            times
        } else {
            return Err(Mistake::new(
                format!("unknown factor {}", quote(factor)),
                Self::allowed(),
            ));
        };
        let unit_name = unit.trim_start_matches(' ');
        let Some(unit) = RateUnit::ALL
            .into_iter()
            .find(|unit| unit.name() == unit_name)
        else {
            let help = match unit_name {
                "sec" | "second" | "S" => {
                    format!("did you mean \"{shown}{factor}/s\"? {}", Self::allowed())
                }
                "m" | "minute" | "M" => {
                    format!("did you mean \"{shown}{factor}/min\"? {}", Self::allowed())
                }
                "hour" | "H" | "hr" => {
                    format!("did you mean \"{shown}{factor}/h\"? {}", Self::allowed())
                }
                _ => Self::allowed(),
            };
            return Err(Mistake::new(
                format!("unknown time unit {}", quote(unit_name)),
                help,
            ));
        };
        let count = match number.times(times) {
            Some((count, true)) => count,
            Some((_, false)) => {
                return Err(Mistake::new(
                    "it is not a whole number of launches",
                    "count over a longer time, such as \"90/min\" for 1.5 a second",
                ));
            }
            None => return Err(Mistake::new("it does not fit in 64 bits", Self::allowed())),
        };
        Self::new(count, unit).ok_or_else(|| {
            Mistake::new(
                if count == 0 {
                    "nothing could ever run"
                } else {
                    "it is above 1000000000 a second"
                },
                Self::allowed(),
            )
        })
    }

    fn write(&self) -> String {
        format!("\"{self}\"")
    }

    fn allowed() -> String {
        "a rate is a string such as \"20000/s\" or \"1.2M/min\" (k, M, G: powers of 1000; per s, min or h), from \"1/h\" to \"1G/s\"".to_owned()
    }
}

impl fmt::Display for Rate {
    /// As in the policy file, without quotes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.count, self.unit.name())
    }
}

/// A share of GPU time from 1 % to 100 %, in steps of 0.01 %.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Percent {
    basis_points: u16,
}

impl Percent {
    /// From hundredths of a percent. None outside 100..=10000.
    pub fn from_basis_points(basis_points: u16) -> Option<Self> {
        (100..=10_000)
            .contains(&basis_points)
            .then_some(Self { basis_points })
    }

    /// In hundredths of a percent.
    pub const fn basis_points(self) -> u16 {
        self.basis_points
    }

    /// As a ratio from 0 to 1.
    pub fn ratio(self) -> f64 {
        f64::from(self.basis_points) / 10_000.0
    }
}

impl Setting for Percent {
    fn read(raw: &Raw<'_>) -> Result<Self, Mistake> {
        percentage(raw, Self::from_basis_points)
    }

    fn write(&self) -> String {
        format!("\"{self}\"")
    }

    fn allowed() -> String {
        "a percentage is a string such as \"50%\" or \"12.5%\", from \"1%\" to \"100%\"".to_owned()
    }
}

impl fmt::Display for Percent {
    /// As in the policy file, without quotes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        decimal(f, self.basis_points.into())?;
        f.write_str("%")
    }
}

/// A percentage of a kind, `of` hundredths of a percent if they are in its range.
pub(crate) fn percentage<T: Setting>(
    raw: &Raw<'_>,
    of: impl FnOnce(u16) -> Option<T>,
) -> Result<T, Mistake> {
    let text = match raw {
        Raw::Text(text) => *text,
        Raw::Integer(Some(number)) if (1..=100).contains(number) => {
            return Err(Mistake::new(
                "the percent sign is missing",
                format!("write \"{number}%\"; {}", T::allowed()),
            ));
        }
        Raw::Float(_) => {
            return Err(Mistake::new(
                "a float is refused, it could mean a ratio or percent",
                T::allowed(),
            ));
        }
        _ => return Err(Mistake::wrong_type(raw, T::allowed())),
    };
    let mistake = |what: String| Err(Mistake::new(what, T::allowed()));
    let Some((number, unit)) = Decimal::split(text) else {
        return mistake(format!("{NOT_A_NUMBER} that a percentage can have"));
    };
    match unit {
        "%" => {}
        "" => return mistake("the percent sign is missing".to_owned()),
        other => return mistake(format!("unknown unit {}", quote(other))),
    }
    match number.times(100) {
        Some((_, false)) => mistake("it is finer than 0.01 %".to_owned()),
        Some((points, true)) => u16::try_from(points)
            .ok()
            .and_then(of)
            .map_or_else(|| mistake("it is out of range".to_owned()), Ok),
        None => mistake("it is out of range".to_owned()),
    }
}

/// Writes hundredths of something as a number, with as many digits as it takes.
pub(crate) fn decimal(f: &mut fmt::Formatter<'_>, hundredths: u32) -> fmt::Result {
    let (whole, rest) = (hundredths / 100, hundredths % 100);
    match rest {
        0 => write!(f, "{whole}"),
        tenths if rest % 10 == 0 => write!(f, "{whole}.{}", tenths / 10),
        rest => write!(f, "{whole}.{rest:02}"),
    }
}

const DURATION_UNITS: [(&str, u64); 6] = [
    ("us", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("min", 60_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// Longest time that a policy can name.
const LONGEST: Duration = Duration::from_hours(24);

impl Setting for Duration {
    fn read(raw: &Raw<'_>) -> Result<Self, Mistake> {
        let text = match raw {
            Raw::Text(text) => *text,
            Raw::Integer(Some(number)) => {
                return Err(Mistake::new(
                    "the unit is missing",
                    format!("write \"{number}s\" or \"{number}ms\"; {}", Self::allowed()),
                ));
            }
            _ => return Err(Mistake::wrong_type(raw, Self::allowed())),
        };
        let Some((number, unit)) = Decimal::split(text) else {
            return Err(Mistake::new(
                format!("{NOT_A_NUMBER} that a time can have"),
                Self::allowed(),
            ));
        };
        if unit.is_empty() {
            return Err(Mistake::new("the unit is missing", Self::allowed()));
        }
        let Some((_, factor)) = DURATION_UNITS.into_iter().find(|(name, _)| *name == unit) else {
            let help = match unit {
                "sec" | "second" | "seconds" => format!(
                    "did you mean \"{}s\"? {}",
                    number_part(text),
                    Self::allowed()
                ),
                _ => unit_help(
                    number_part(text),
                    unit,
                    DURATION_UNITS.iter().map(|(name, _)| *name),
                    Self::allowed(),
                ),
            };
            return Err(Mistake::new(format!("unknown unit {}", quote(unit)), help));
        };
        match number.times(factor) {
            Some((nanos, _)) if Self::from_nanos(nanos) <= LONGEST => Ok(Self::from_nanos(nanos)),
            _ => Err(Mistake::new("it is longer than a day", Self::allowed())),
        }
    }

    fn write(&self) -> String {
        let nanos = self.as_nanos();
        let whole = |(name, factor): (&str, u64)| {
            let factor = u128::from(factor);
            (nanos > 0 && nanos.is_multiple_of(factor))
                .then(|| format!("\"{}{name}\"", nanos / factor))
        };
        let units = [
            ("h", 3_600_000_000_000),
            ("m", 60_000_000_000),
            ("s", 1_000_000_000),
            ("ms", 1_000_000),
            ("us", 1_000),
        ];
        units.into_iter().find_map(whole).unwrap_or_else(|| {
            if nanos == 0 {
                return "\"0s\"".to_owned();
            }
            // Finer than a microsecond: only a fraction can have written it.
            format!("\"{}.{:03}us\"", nanos / 1_000, nanos % 1_000)
        })
    }

    fn allowed() -> String {
        "a time is a string such as \"10ms\", \"1.5s\" or \"2m\" (us, ms, s, m or min, h), at most a day".to_owned()
    }
}

/// Why a text is not the value that it should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {what}; {help}", quote(text))]
pub struct ValueError {
    text: String,
    what: String,
    help: String,
}

fn from_text<T: Setting>(text: &str) -> Result<T, ValueError> {
    T::read(&Raw::bare(text)).map_err(|Mistake { what, help }| ValueError {
        text: text.to_owned(),
        what,
        help,
    })
}

/// Reads a time as a policy file writes it, such as `10ms`.
///
/// # Errors
/// The text is not a time, or longer than a day.
pub fn parse_duration(text: &str) -> Result<Duration, ValueError> {
    from_text(text)
}

/// A time as a policy file writes it, without quotes.
pub fn format_duration(duration: Duration) -> String {
    duration.write().trim_matches('"').to_owned()
}

impl FromStr for Size {
    type Err = ValueError;

    /// Reads `40GiB`, or a whole number of bytes.
    fn from_str(text: &str) -> Result<Self, ValueError> {
        from_text(text)
    }
}

impl FromStr for Rate {
    type Err = ValueError;

    /// Reads `20000/s`.
    fn from_str(text: &str) -> Result<Self, ValueError> {
        from_text(text)
    }
}

impl FromStr for Percent {
    type Err = ValueError;

    /// Reads `50%`.
    fn from_str(text: &str) -> Result<Self, ValueError> {
        from_text(text)
    }
}

/// A share relative to others that want the same: from 1 to 10000, 100 by default, as in cgroup v2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Weight(u32);

impl Weight {
    /// None outside 1..=10000.
    pub fn new(weight: u32) -> Option<Self> {
        (1..=10_000).contains(&weight).then_some(Self(weight))
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// Reads an integer within bounds.
pub(crate) fn integer_within(
    raw: &Raw<'_>,
    bounds: std::ops::RangeInclusive<u32>,
    allowed: impl Fn() -> String,
) -> Result<u32, Mistake> {
    match raw {
        Raw::Integer(Some(number)) => u32::try_from(*number)
            .ok()
            .filter(|number| bounds.contains(number))
            .ok_or_else(|| Mistake::new("it is out of range", allowed())),
        Raw::Integer(None) => Err(Mistake::new("it is out of range", allowed())),
        Raw::Text(text)
            if text
                .parse::<u32>()
                .is_ok_and(|number| bounds.contains(&number)) =>
        {
            Err(Mistake::new(
                "a number stands without quotes",
                format!("write {text}; {}", allowed()),
            ))
        }
        _ => Err(Mistake::wrong_type(raw, allowed())),
    }
}

impl Setting for Weight {
    fn read(raw: &Raw<'_>) -> Result<Self, Mistake> {
        integer_within(raw, 1..=10_000, Self::allowed).map(Self)
    }

    fn write(&self) -> String {
        self.0.to_string()
    }

    fn allowed() -> String {
        "a weight is an integer from 1 to 10000; 100 is what a tenant has that says nothing"
            .to_owned()
    }
}

impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// `launch.burst`.
impl Setting for u32 {
    fn read(raw: &Raw<'_>) -> Result<Self, Mistake> {
        integer_within(raw, 1..=1_000_000_000, Self::allowed)
    }

    fn write(&self) -> String {
        self.to_string()
    }

    fn allowed() -> String {
        "a count is an integer from 1 to 1000000000".to_owned()
    }
}

impl Setting for bool {
    fn read(raw: &Raw<'_>) -> Result<Self, Mistake> {
        match raw {
            Raw::Boolean(value) => Ok(*value),
            Raw::Text("true" | "false" | "yes" | "no" | "on" | "off") => Err(Mistake::new(
                "a boolean stands without quotes",
                Self::allowed(),
            )),
            _ => Err(Mistake::wrong_type(raw, Self::allowed())),
        }
    }

    fn write(&self) -> String {
        self.to_string()
    }

    fn allowed() -> String {
        "it is true or false, without quotes".to_owned()
    }
}

/// A setting that is one of a few words.
macro_rules! words {
    ($(#[doc = $doc:literal])+ $name:ident { $($(#[doc = $word_doc:literal])+ $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[doc = $word_doc])+ $variant,)+
        }

        impl $name {
            /// All of them, in the order of the documentation.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// The word in the policy file.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)+
                }
            }
        }

        impl Setting for $name {
            fn read(raw: &Raw<'_>) -> Result<Self, Mistake> {
                let Raw::Text(text) = raw else { return Err(Mistake::wrong_type(raw, Self::allowed())) };
                Self::ALL.iter().copied().find(|word| word.as_str() == *text).ok_or_else(|| unknown_word(text, &[$($word),+]))
            }

            fn write(&self) -> String {
                format!("\"{}\"", self.as_str())
            }

            fn allowed() -> String {
                one_of(&[$($word),+])
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

fn one_of(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => {
            format!("allowed are {} and {last}", rest.join(", "))
        }
        _ => format!("allowed is {}", quoted.join("")),
    }
}

fn unknown_word(text: &str, words: &[&str]) -> Mistake {
    let help = match nearest(text, words.iter().copied()) {
        Some(word) => format!("did you mean \"{word}\"? {}", one_of(words)),
        None => one_of(words),
    };
    Mistake::new("unknown value", help)
}

words! {
    /// What happens to an allocation above `memory.max`.
    OnMemoryMax {
        /// It is refused as out of memory; the program may go on.
        Deny = "deny",
        /// It waits until memory is free, at most `memory.wait-timeout`, then it is refused.
        Wait = "wait",
        /// The process is killed.
        Kill = "kill",
    }
}

words! {
    /// What happens to managed (unified) memory.
    Managed {
        /// Its virtual size is charged like device memory.
        Charge = "charge",
        /// It is refused.
        Deny = "deny",
        /// It is not counted.
        Ignore = "ignore",
    }
}

words! {
    /// What happens when memory was obtained although it was refused.
    OnBreach {
        /// The process is killed.
        Kill = "kill",
        /// An event and a metric say so.
        Notify = "notify",
    }
}

words! {
    /// What happens to who caused a GPU fault.
    OnXid {
        /// An event and a metric say so.
        Notify = "notify",
        /// The tenant is frozen on that GPU until it is thawed.
        Freeze = "freeze",
        /// The process is killed.
        Kill = "kill",
    }
}

words! {
    /// What happens to launches above `launch.max`.
    OnLaunchMax {
        /// They are delayed.
        Delay = "delay",
        /// The process is told to end, and killed after `launch.patience`.
        Deny = "deny",
    }
}

words! {
    /// How launches are delayed.
    Pace {
        /// The thread's process is stopped and continued by signals.
        Signal = "signal",
        /// The launching thread spins for short delays.
        Spin = "spin",
        /// The tenant's cgroup is frozen and thawed.
        Freeze = "freeze",
    }
}

words! {
    /// What the launch of a graph costs.
    GraphCost {
        /// One launch.
        One = "one",
        /// As many launches as it has kernel nodes.
        Nodes = "nodes",
    }
}

words! {
    /// A signal that a policy may send.
    ///
    /// Signals that stop or continue are not among them: the daemon continues only what it stopped itself.
    Signal {
        /// Hang-up.
        Hup = "HUP",
        /// Interrupt.
        Int = "INT",
        /// Quit, with a core dump by default.
        Quit = "QUIT",
        /// Abort, with a core dump by default.
        Abrt = "ABRT",
        /// For the program's own use.
        Usr1 = "USR1",
        /// For the program's own use.
        Usr2 = "USR2",
        /// Terminate.
        Term = "TERM",
        /// Kill.
        Kill = "KILL",
        /// Urgent condition; ignored by default.
        Urg = "URG",
        /// Window size; ignored by default.
        Winch = "WINCH",
    }
}

impl Signal {
    /// Its number on x86-64 and arm64 Linux (signal(7)).
    pub const fn number(self) -> i32 {
        match self {
            Self::Hup => 1,
            Self::Int => 2,
            Self::Quit => 3,
            Self::Abrt => 6,
            Self::Kill => 9,
            Self::Usr1 => 10,
            Self::Usr2 => 12,
            Self::Term => 15,
            Self::Urg => 23,
            Self::Winch => 28,
        }
    }
}

/// What happens when `memory.high` is crossed, besides the event and the metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OnHigh {
    /// Nothing more.
    Notify,
    /// The tenant's processes get a signal.
    Signal(Signal),
    /// Managed memory is moved to the host.
    Reclaim,
    /// The tenant is frozen until it is thawed.
    Freeze,
}

impl Setting for OnHigh {
    fn read(raw: &Raw<'_>) -> Result<Self, Mistake> {
        let Raw::Text(text) = raw else {
            return Err(Mistake::wrong_type(raw, Self::allowed()));
        };
        match *text {
            "notify" => Ok(Self::Notify),
            "reclaim" => Ok(Self::Reclaim),
            "freeze" => Ok(Self::Freeze),
            text => {
                let Some(name) = text.strip_prefix("signal:") else {
                    let help = match nearest(text, ["notify", "reclaim", "freeze", "signal:USR1"]) {
                        Some(word) => format!("did you mean \"{word}\"? {}", Self::allowed()),
                        None => Self::allowed(),
                    };
                    return Err(Mistake::new("unknown value", help));
                };
                let words: Vec<&str> = Signal::ALL.iter().map(|signal| signal.as_str()).collect();
                Signal::ALL
                    .iter()
                    .find(|signal| signal.as_str() == name)
                    .map(|signal| Self::Signal(*signal))
                    .ok_or_else(|| {
                        let bare = name.strip_prefix("SIG").unwrap_or(name);
                        let hint = nearest(bare, words.iter().copied())
                            .map_or(String::new(), |word| {
                                format!("did you mean \"signal:{word}\"? ")
                            });
                        Mistake::new(
                            format!("unknown signal {}", quote(name)),
                            format!("{hint}{}", one_of(&words)),
                        )
                    })
            }
        }
    }

    fn write(&self) -> String {
        format!("\"{self}\"")
    }

    fn allowed() -> String {
        "allowed are \"notify\", \"reclaim\", \"freeze\" and \"signal:NAME\" with a name such as USR1 or TERM".to_owned()
    }
}

impl fmt::Display for OnHigh {
    /// As in the policy file, without quotes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Notify => f.write_str("notify"),
            Self::Signal(signal) => write!(f, "signal:{signal}"),
            Self::Reclaim => f.write_str("reclaim"),
            Self::Freeze => f.write_str("freeze"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(text: &str) -> Result<u64, String> {
        Size::read(&Raw::Text(text))
            .map(|size| size.0)
            .map_err(|mistake| format!("{}; {}", mistake.what, mistake.help))
    }

    #[test]
    fn sizes() {
        assert_eq!(size("40GiB"), Ok(40 << 30));
        assert_eq!(size("8GB"), Ok(8_000_000_000));
        assert_eq!(size("1.5 GiB"), Ok(3 << 29));
        assert_eq!(size("0.1GiB"), Ok(107_374_182));
        assert_eq!(size("0B"), Ok(0));
        assert_eq!(size("18446744073709551615B"), Ok(u64::MAX));
        assert_eq!(Size::read(&Raw::Integer(Some(4096))), Ok(Size(4096)));
        for bad in [
            "",
            "GiB",
            "4",
            "4.GiB",
            ".5GiB",
            "-1GiB",
            "4G",
            "4Gi",
            "4gib",
            "1.2.3GiB",
            "17179869184GiB",
            "4 Gi B",
            "1e3MiB",
            "٤GiB",
        ] {
            assert!(size(bad).is_err(), "{bad}");
        }
        assert!(Size::read(&Raw::Float("1.5")).is_err());
        assert!(Size::read(&Raw::Integer(Some(-1))).is_err());
        assert!(
            size("40Gib")
                .expect_err("unit")
                .contains("did you mean \"40GiB\"?")
        );
        assert!(
            size("40G")
                .expect_err("unit")
                .contains("\"40GiB\" (powers of 1024) or \"40GB\"")
        );
        assert!(
            size("4096")
                .expect_err("unit")
                .contains("write 4096 without quotes")
        );
    }

    #[test]
    fn sizes_print_exactly() {
        for (bytes, text) in [
            (0, "0"),
            (1, "1"),
            (1 << 40, "\"1TiB\""),
            (3 << 29, "\"1536MiB\""),
            (8_000_000_000, "\"8GB\""),
            (1025, "1025"),
            (u64::MAX, "\"18446744073709551615B\""),
        ] {
            assert_eq!(Size(bytes).write(), text);
        }
    }

    fn rate(text: &str) -> Option<(u64, RateUnit)> {
        Rate::read(&Raw::Text(text))
            .ok()
            .map(|rate| (rate.count(), rate.unit()))
    }

    #[test]
    fn rates() {
        assert_eq!(rate("20000/s"), Some((20_000, RateUnit::Second)));
        assert_eq!(rate("1.2M/min"), Some((1_200_000, RateUnit::Minute)));
        assert_eq!(rate("2 k / h"), Some((2_000, RateUnit::Hour)));
        assert_eq!(rate("1G/s"), Some((1_000_000_000, RateUnit::Second)));
        for bad in [
            "",
            "20000",
            "20000/",
            "/s",
            "20000/m",
            "20000/sec",
            "1.5/s",
            "0/s",
            "2G/s",
            "1X/s",
            "20000 s",
            "1/s/s",
        ] {
            assert_eq!(rate(bad), None, "{bad}");
        }
        assert!(Rate::read(&Raw::Integer(Some(5))).is_err());
    }

    #[test]
    fn rates_are_exact() {
        let rate = Rate::new(3, RateUnit::Minute).expect("in range");
        assert_eq!(rate.nanos_for(1), 20_000_000_000);
        assert_eq!(rate.events_in(59_999_999_999), 2);
        let third = Rate::new(3, RateUnit::Second).expect("in range");
        assert_eq!(third.nanos_for(1), 333_333_334);
        assert_eq!(third.nanos_for(3), 1_000_000_000);
        assert_eq!(third.nanos_for(u64::MAX), u64::MAX);
        assert!((third.per_second() - 3.0).abs() < f64::EPSILON);
    }

    #[test]
    fn percents() {
        let points = |text: &str| {
            Percent::read(&Raw::Text(text))
                .ok()
                .map(Percent::basis_points)
        };
        assert_eq!(points("50%"), Some(5_000));
        assert_eq!(points("12.5%"), Some(1_250));
        assert_eq!(points("12.05 %"), Some(1_205));
        assert_eq!(points("100%"), Some(10_000));
        for bad in [
            "0%",
            "0.5%",
            "101%",
            "50",
            "50pct",
            "%",
            "12.345%",
            "-5%",
            "9999999999999999999999%",
        ] {
            assert_eq!(points(bad), None, "{bad}");
        }
        for text in ["\"50%\"", "\"12.5%\"", "\"12.05%\""] {
            assert_eq!(
                Percent::read(&Raw::Text(text.trim_matches('"')))
                    .expect("good")
                    .write(),
                text
            );
        }
    }

    #[test]
    fn durations() {
        let read = |text: &str| Duration::read(&Raw::Text(text)).ok();
        assert_eq!(read("10ms"), Some(Duration::from_millis(10)));
        assert_eq!(read("1.5s"), Some(Duration::from_millis(1500)));
        assert_eq!(read("2m"), Some(Duration::from_mins(2)));
        assert_eq!(read("2min"), Some(Duration::from_mins(2)));
        assert_eq!(read("24h"), Some(LONGEST));
        assert_eq!(read("0s"), Some(Duration::ZERO));
        for bad in ["", "10", "ms", "25h", "1d", "-1s", "1 sec", "1m30s"] {
            assert_eq!(read(bad), None, "{bad}");
        }
        for text in ["0s", "1h", "90s", "1500ms", "7us", "0.001us", "1.234us"] {
            let value = read(text).expect("good");
            assert_eq!(read(value.write().trim_matches('"')), Some(value));
        }
    }

    #[test]
    fn texts_of_other_files_are_read_the_same_way() {
        assert_eq!("20GiB".parse(), Ok(Size(20 << 30)));
        assert_eq!("4096".parse(), Ok(Size(4096)));
        assert_eq!(
            "5/min".parse(),
            Ok(Rate::new(5, RateUnit::Minute).expect("in range"))
        );
        assert_eq!("50%".parse::<Percent>().map(Percent::ratio), Ok(0.5));
        assert_eq!(parse_duration("60min"), Ok(Duration::from_hours(1)));
        assert_eq!(format_duration(Duration::from_secs(90)), "90s");
        let error = parse_duration("10").expect_err("no unit").to_string();
        assert!(
            error.starts_with("\"10\": the unit is missing; write \"10s\""),
            "{error}"
        );
    }

    #[test]
    fn words_and_signals() {
        assert_eq!(OnMemoryMax::read(&Raw::Text("wait")), Ok(OnMemoryMax::Wait));
        let mistake = OnMemoryMax::read(&Raw::Text("denny")).expect_err("unknown");
        assert_eq!(
            mistake.help,
            "did you mean \"deny\"? allowed are \"deny\", \"wait\" and \"kill\""
        );
        assert_eq!(
            OnHigh::read(&Raw::Text("signal:USR1")),
            Ok(OnHigh::Signal(Signal::Usr1))
        );
        let mistake = OnHigh::read(&Raw::Text("signal:SIGUSR2")).expect_err("prefix");
        assert!(
            mistake.help.starts_with("did you mean \"signal:USR2\"?"),
            "{}",
            mistake.help
        );
        assert!(OnHigh::read(&Raw::Text("signal:STOP")).is_err());
        assert!(OnHigh::read(&Raw::Text("signal")).is_err());
    }

    #[test]
    fn a_limit_can_be_lifted() {
        assert_eq!(Limit::<Size>::read(&Raw::Text("max")), Ok(Limit::Max));
        assert_eq!(
            Limit::<Size>::read(&Raw::Integer(Some(7))),
            Ok(Limit::At(Size(7)))
        );
        let mistake = Limit::<Size>::read(&Raw::Text("unlimited")).expect_err("unknown");
        assert_eq!(mistake.help, "write \"max\" for no limit");
    }

    #[test]
    fn weights_have_the_range_of_cgroups() {
        let read = |raw| Weight::read(&raw).ok().map(Weight::get);
        assert_eq!(read(Raw::Integer(Some(1))), Some(1));
        assert_eq!(read(Raw::Integer(Some(10_000))), Some(10_000));
        for bad in [
            Raw::Integer(Some(0)),
            Raw::Integer(Some(10_001)),
            Raw::Integer(None),
            Raw::Text("5"),
            Raw::Float("5.0"),
        ] {
            assert_eq!(read(bad), None);
        }
    }
}
