//! The name that was probably meant.

/// The known name nearest to `name`, if it is near enough to be meant.
pub(super) fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let name: Vec<char> = name.chars().take(64).map(|c| c.to_ascii_lowercase()).collect();
    known
        .iter()
        .map(|candidate| (distance(&name, candidate), *candidate))
        .filter(|(distance, candidate)| *distance <= 1.max(candidate.len() * 2 / 5))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// The names in backquotes, with commas between them.
pub(super) fn list(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// The least number of insertions, deletions and replacements of one character
/// that make one text the other (Levenshtein), `_` and `-` being the same.
fn distance(a: &[char], b: &str) -> usize {
    let same = |x: char, y: char| x == y || (x == '-' && y == '_');
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(!same(*x, *y));
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_pen_finds_its_name() {
        let names = ["rate", "burst", "max_wait", "overrides", "key"];
        assert_eq!(nearest("busrt", &names), Some("burst"));
        assert_eq!(nearest("rates", &names), Some("rate"));
        assert_eq!(nearest("Max-Wait", &names), Some("max_wait"));
        assert_eq!(nearest("override", &names), Some("overrides"));
        assert_eq!(nearest("colour", &names), None);
        assert_eq!(nearest("", &names), None);
    }
}
