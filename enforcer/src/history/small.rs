//! Amounts of memory in sixteen bits: exact up to 128 MiB in steps of 64 KiB, above it to a tenth of a percent.

/// The least that is told apart: the smallest page that the driver hands out.
const UNIT: u64 = 64 << 10;
const MANTISSA: u32 = 11;

/// An amount. The largest pattern stands for an unknown one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Small(u16);

impl Small {
    pub(super) const UNKNOWN: Self = Self(u16::MAX);

    /// The nearest one that is not below.
    pub(super) fn at_least(bytes: u64) -> Self {
        let units = bytes.div_ceil(UNIT);
        let bits = u64::BITS - units.leading_zeros();
        let mut exponent = bits.saturating_sub(MANTISSA);
        let mut mantissa = units >> exponent;
        if mantissa << exponent != units {
            mantissa += 1;
            if mantissa >> MANTISSA != 0 {
                mantissa >>= 1;
                exponent += 1;
            }
        }
        // 48 bits of units at most: exponents up to 37 do not fit, and no card has 2^57 bytes.
        match u16::try_from((u64::from(exponent) << MANTISSA) | mantissa) {
            Ok(word) if word != u16::MAX && exponent < 32 => Self(word),
            _ => Self(u16::MAX - 1),
        }
    }

    /// The amount, `None` for an unknown one.
    pub(super) fn bytes(self) -> Option<u64> {
        if self == Self::UNKNOWN {
            return None;
        }
        let mantissa = u64::from(self.0 & ((1 << MANTISSA) - 1));
        Some((mantissa << (self.0 >> MANTISSA)) * UNIT)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_of_the_driver_are_exact() {
        for bytes in [0, 64 << 10, 2 << 20, 128 << 20, 1 << 30, 141 << 30] {
            assert_eq!(Small::at_least(bytes).bytes(), Some(bytes));
        }
        assert_eq!(Small::at_least(1).bytes(), Some(UNIT));
        assert_eq!(Small::UNKNOWN.bytes(), None);
        assert!(Small::at_least(u64::MAX).bytes().is_some());
    }

    proptest! {
        /// Never less than it was, and hardly more.
        #[test]
        fn an_amount_is_kept_to_a_tenth_of_a_percent(bytes in 0u64..1 << 50) {
            let kept = Small::at_least(bytes).bytes().expect("known");
            prop_assert!(kept >= bytes);
            prop_assert!(kept - bytes <= UNIT + bytes / 1000, "{} for {}", kept, bytes);
        }

        /// Larger stays larger, or becomes equal.
        #[test]
        fn order_is_kept(a in 0u64..1 << 50, b in 0u64..1 << 50) {
            let (low, high) = (a.min(b), a.max(b));
            prop_assert!(Small::at_least(low).bytes() <= Small::at_least(high).bytes());
        }
    }
}
