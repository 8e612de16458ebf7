//! Numbers at offsets of the driver's structures.
//!
//! Reading beyond the end gives 0 and writing there does nothing: sizes are checked once, where a
//! structure comes in.

/// The `u32` at `offset`.
pub fn u32_at(buf: &[u8], offset: usize) -> u32 {
    buf.get(offset..offset + 4)
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(0, u32::from_ne_bytes)
}

/// The `u64` at `offset`.
pub fn u64_at(buf: &[u8], offset: usize) -> u64 {
    buf.get(offset..offset + 8)
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(0, u64::from_ne_bytes)
}

/// Writes `bytes` at `offset`.
pub fn put(buf: &mut [u8], offset: usize, bytes: &[u8]) {
    if let Some(place) = buf.get_mut(offset..offset + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

/// Writes a `u32` at `offset`.
pub fn put_u32(buf: &mut [u8], offset: usize, value: u32) {
    put(buf, offset, &value.to_ne_bytes());
}

/// Writes a `u64` at `offset`.
pub fn put_u64(buf: &mut [u8], offset: usize, value: u64) {
    put(buf, offset, &value.to_ne_bytes());
}

/// A size as people write it: a number of bytes, or with `KiB`, `MiB`, `GiB` or `TiB`.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let shift = match unit.trim() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        other => {
            return Err(format!(
                "unknown unit {other:?} in {text:?}: B, KiB, MiB, GiB or TiB"
            ));
        }
    };
    let number: u64 = number
        .parse()
        .map_err(|_| format!("{text:?} is not a size"))?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| format!("{text:?} is too large"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(parse_size("17"), Ok(17));
        assert_eq!(parse_size("2MiB"), Ok(2 << 20));
        assert_eq!(parse_size("1 GiB"), Ok(1 << 30));
        assert!(parse_size("1.5GiB").is_err());
        assert!(parse_size("99999999999TiB").is_err());
        assert!(parse_size("GiB").is_err());
    }

    #[test]
    fn out_of_range_is_harmless() {
        let mut buf = [1, 0, 0, 0];
        assert_eq!(u32_at(&buf, 0), 1);
        assert_eq!(u32_at(&buf, 1), 0);
        put_u64(&mut buf, 0, 7);
        assert_eq!(buf, [1, 0, 0, 0]);
    }
}
