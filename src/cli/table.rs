//! Tables for terminals: plain columns, numbers on the right, nothing that a peer
//! or a client sent can move the cursor.

use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};

/// Which side a column's cells keep to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// Text.
    Left,
    /// Numbers and durations.
    Right,
}

/// A table with these columns.
pub(super) fn render(columns: &[(&str, Side)], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if columns.iter().any(|(name, _)| !name.is_empty()) {
        table.set_header(columns.iter().map(|(name, _)| *name));
    }
    for row in rows {
        table.add_row(row.iter().map(|cell| visible(cell)));
    }
    for (column, (_, side)) in table.column_iter_mut().zip(columns) {
        column.set_padding((0, 2));
        column.set_cell_alignment(match side {
            Side::Left => CellAlignment::Left,
            Side::Right => CellAlignment::Right,
        });
    }
    table.trim_fmt()
}

/// `text` without characters that a terminal would act on.
fn visible(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

/// Micro-tokens as tokens with at most three decimals, rounded down, so that a
/// token that is almost there does not look as if it were.
pub(super) fn tokens(micros: i64) -> String {
    let millis = i128::from(micros).div_euclid(1000);
    let sign = if millis < 0 { "-" } else { "" };
    let (whole, rest) = (millis.abs() / 1000, millis.abs() % 1000);
    if rest == 0 {
        return format!("{sign}{whole}");
    }
    format!("{sign}{whole}.{rest:03}").trim_end_matches('0').to_owned()
}

/// A duration in as few digits as help; `-` for none.
pub(super) fn span(duration: Option<&prost_types::Duration>) -> String {
    let Some(duration) = duration else { return "-".to_owned() };
    let exact = Duration::try_from(*duration).unwrap_or_default();
    let step = match exact {
        d if d >= Duration::from_secs(60) => 1_000_000_000,
        d if d >= Duration::from_secs(1) => 100_000_000,
        d if d >= Duration::from_millis(1) => 1_000_000,
        _ => 1000,
    };
    // Up, so that waiting this long is enough.
    let nanos = exact.as_nanos().div_ceil(step) * step;
    let rounded = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
    humantime::format_duration(rounded).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_on_the_right_and_no_line_has_trailing_blanks() {
        let text = render(
            &[("NAME", Side::Left), ("N", Side::Right), ("X", Side::Left)],
            vec![
                vec!["a".into(), "1".into(), String::new()],
                vec!["longer".into(), "1000".into(), "x".into()],
            ],
        );
        assert_eq!(text, "NAME       N  X\na          1\nlonger  1000  x");
    }

    #[test]
    fn a_cell_cannot_move_the_cursor() {
        let text = render(&[("A", Side::Left)], vec![vec!["a\u{1b}[2J\nb".into()]]);
        assert_eq!(text, "A\na\\u{1b}[2J\\nb");
    }

    #[test]
    fn tokens_are_rounded_down() {
        for (micros, text) in [
            (0, "0"),
            (12_000_000, "12"),
            (12_500_000, "12.5"),
            (999_999, "0.999"),
            (-1, "-0.001"),
            (-2_000_000, "-2"),
            (i64::MAX, "9223372036854.775"),
        ] {
            assert_eq!(tokens(micros), text);
        }
    }

    #[test]
    fn durations_have_few_digits() {
        let of = |seconds, nanos| span(Some(&prost_types::Duration { seconds, nanos }));
        assert_eq!(of(0, 0), "0s");
        assert_eq!(of(0, 12_345), "13us");
        assert_eq!(of(0, 12_345_678), "13ms");
        assert_eq!(of(3, 210_000_000), "3s 300ms");
        assert_eq!(of(61, 1), "1m 2s");
        assert_eq!(span(None), "-");
    }
}
