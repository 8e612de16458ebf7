//! Did you mean …?

/// The candidate that `given` was most probably meant to be, if one is near enough.
pub(crate) fn nearest<'a>(
    given: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    // Longer than any key or name: a comparison would cost time and find nothing.
    if given.is_empty() || given.len() > 128 {
        return None;
    }
    let folded = fold(given);
    candidates
        .into_iter()
        .filter_map(|candidate| {
            let target = fold(candidate);
            let longer = target.chars().count().max(folded.chars().count());
            let distance = distance(&folded, &target);
            (distance <= (longer / 3).max(1)).then_some((distance, candidate))
        })
        .min()
        .map(|(_, candidate)| candidate)
}

/// The keys that an unknown key may have been meant to be: the nearest one, or those of which it is the last part.
pub(crate) fn nearest_keys<'a>(given: &str, keys: &[&'a str]) -> Vec<&'a str> {
    let last = |key: &'a str| key.rsplit('.').next().unwrap_or(key);
    let translated = translate(given);
    let given = translated.as_deref().unwrap_or(given);
    if keys.contains(&given) {
        return keys.iter().copied().filter(|key| *key == given).collect();
    }
    if !given.contains('.') {
        let lasts: Vec<&str> = keys
            .iter()
            .copied()
            .filter(|key| key.contains('.'))
            .map(last)
            .collect();
        // `weight` or `wieght` for `time.weight`; short words are near to everything.
        if given.len() >= 3
            && let Some(near) = nearest(given, lasts.iter().copied())
            && (near == given || near.len() >= 5)
        {
            return keys
                .iter()
                .copied()
                .filter(|key| key.contains('.') && last(key) == near)
                .collect();
        }
    }
    nearest(given, keys.iter().copied()).into_iter().collect()
}

/// What other systems call the same thing.
fn translate(given: &str) -> Option<String> {
    let (group, last) = given
        .rsplit_once('.')
        .map_or(("", given), |(group, last)| (group, last));
    let own = match last {
        "limit" | "hard" | "quota" | "ceiling" => "max",
        "soft" | "request" => "high",
        "reserve" | "reservation" | "guarantee" | "low" => "min",
        "share" | "shares" => "weight",
        _ => return None,
    };
    Some(if group.is_empty() {
        own.to_owned()
    } else {
        format!("{group}.{own}")
    })
}

/// Case, and which of `-` and `_` was used, is no difference.
fn fold(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '_' | ' ' => '-',
            c => c.to_ascii_lowercase(),
        })
        .collect()
}

/// Optimal string alignment: insert, delete, replace, swap of neighbours.
fn distance(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.chars().collect();
    let b: Vec<char> = b.chars().collect();
    let width = b.len() + 1;
    let mut rows = vec![0; (a.len() + 1) * width];
    for (j, cell) in rows[..width].iter_mut().enumerate() {
        *cell = j;
    }
    for i in 1..=a.len() {
        rows[i * width] = i;
        for j in 1..=b.len() {
            let replace = usize::from(a[i - 1] != b[j - 1]);
            let mut best = (rows[(i - 1) * width + j] + 1)
                .min(rows[i * width + j - 1] + 1)
                .min(rows[(i - 1) * width + j - 1] + replace);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[(i - 2) * width + j - 2] + 1);
            }
            rows[i * width + j] = best;
        }
    }
    rows[a.len() * width + b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: [&str; 4] = ["memory.max", "memory.high", "time.weight", "launch.max"];

    #[test]
    fn near_ones_are_found() {
        assert_eq!(nearest("memroy.max", KEYS), Some("memory.max"));
        assert_eq!(nearest("memory_max", KEYS), Some("memory.max"));
        assert_eq!(nearest("Memory.High", KEYS), Some("memory.high"));
        assert_eq!(nearest("launch.mx", KEYS), Some("launch.max"));
    }

    #[test]
    fn a_key_without_its_table_is_found() {
        assert_eq!(nearest_keys("weight", &KEYS), ["time.weight"]);
        assert_eq!(nearest_keys("wieght", &KEYS), ["time.weight"]);
        assert_eq!(nearest_keys("max", &KEYS), ["memory.max", "launch.max"]);
        assert_eq!(nearest_keys("memory.limit", &KEYS), ["memory.max"]);
        assert_eq!(nearest_keys("limit", &KEYS), ["memory.max", "launch.max"]);
        assert_eq!(nearest_keys("time.share", &KEYS), ["time.weight"]);
        assert!(nearest_keys("mux", &KEYS).is_empty());
        assert!(nearest_keys("", &KEYS).is_empty());
    }

    #[test]
    fn far_ones_are_not() {
        assert_eq!(nearest("colour", KEYS), None);
        assert_eq!(nearest("", KEYS), None);
        assert_eq!(nearest(&"m".repeat(10_000), KEYS), None);
    }

    #[test]
    fn distances() {
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("abc", "acb"), 1);
        assert_eq!(distance("kitten", "sitting"), 3);
    }
}
