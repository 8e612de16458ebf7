//! Did you mean …?

/// The candidate that `given` was most probably meant to be, if one is near enough.
pub(crate) fn nearest<'a>(
    given: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    // Longer than any key or name: a comparison would cost time and find nothing.
    if given.len() > 128 {
        return None;
    }
    let folded = fold(given);
    candidates
        .into_iter()
        .filter_map(|candidate| {
            let target = fold(candidate);
            let distance = if target == folded {
                0
            } else if folded.len() >= 3 && target.rsplit('.').next() == Some(folded.as_str()) {
                // `weight` for `time.weight`
                1
            } else {
                distance(&folded, &target)
            };
            let allowed = (target.chars().count().max(folded.chars().count()) / 3).max(1);
            (distance <= allowed).then_some((distance, candidate))
        })
        .min()
        .map(|(_, candidate)| candidate)
}

/// Case, and which of `.`, `-`, `_` was used, is no difference.
fn fold(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '_' | '-' | ' ' => '-',
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
        assert_eq!(nearest("weight", KEYS), Some("time.weight"));
        assert_eq!(nearest("Memory.High", KEYS), Some("memory.high"));
        assert_eq!(nearest("launch.mx", KEYS), Some("launch.max"));
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
