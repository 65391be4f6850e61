//! A document on a terminal.

use super::{Page, Report};

/// Heights of a bar.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// A document as lines of text: a strip of its utilities with its cuts and, where they are known, the true units, then its chunks. `width` is in columns; with
/// `colour`, chunks alternate.
#[must_use]
pub fn terminal(report: &Report, page: &Page, width: usize, colour: bool) -> String {
    let paint = |code: &str, text: &str| if colour && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() };
    let width = width.clamp(20, 400);
    let column = |token: u32| (u64::from(token) * width as u64 / u64::from(page.tokens.max(1))).min(width as u64 - 1) as usize;
    let edges = &page.edges;
    let mut strip: Vec<Option<f64>> = vec![None; width];
    for (token, utility) in edges.token.iter().zip(&edges.utility) {
        let place = &mut strip[column(*token)];
        *place = (*place).into_iter().chain(*utility).reduce(f64::max);
    }
    let bar = |u: &Option<f64>| u.map_or(' ', |u| BARS[((u * 8.0) as usize).min(7)]);
    let marks = |tokens: &mut dyn Iterator<Item = u32>, mark: char| {
        let mut line = vec![' '; width];
        tokens.for_each(|token| line[column(token)] = mark);
        line.into_iter().collect::<String>().trim_end().to_owned()
    };
    let penalty =
        report.program.as_ref().map_or(String::new(), |p| format!(", penalty {}{}", p.penalty, if p.damage { " nats" } else { "" }));
    let chunks = page.chunks();
    let relaxed = if page.relaxed { "; a limit gave way" } else { "" };
    let mut out = format!("{}: {} tokens, {} chunks{penalty}{relaxed}\n\n", clean(&page.id), page.tokens, chunks.len());
    if report.program.is_some() {
        out += &format!("{}  utility\n", strip.iter().map(bar).collect::<String>());
        out += &format!("{}  cuts\n", paint("1", &format!("{:width$}", marks(&mut page.cuts.iter().map(|&c| edges.token[c]), '┃'))));
    }
    if let Some(gold) = &page.gold {
        out += &format!("{:width$}  true units\n", marks(&mut gold.iter().copied(), '╿'));
    }
    let start_of = |edge: Option<usize>| edge.map_or(0, |edge| edges.token[edge]);
    for (i, &(byte, edge)) in chunks.iter().enumerate() {
        let next = chunks.get(i + 1);
        let (from, to) = (start_of(edge), next.map_or(page.tokens, |n| start_of(n.1)));
        let mut line = format!("── {i}, tokens {from} to {to} ({})", to - from);
        if let Some(edge) = edge {
            let of = |values: &[Option<f32>]| values.get(edge).copied().flatten();
            if let Some(damage) = of(&edges.damage) {
                line += &format!(", cut damage {damage:.1} nats");
            }
            if let Some(score) = of(&edges.score) {
                line += &format!(", score {score:.3}");
            }
            if let Some(utility) = edges.utility.get(edge).copied().flatten() {
                line += &format!(", utility {utility:.3}");
            }
            if edges.kind.get(edge) == Some(&"fallback") {
                line += ", a fallback edge";
            }
        }
        let rest = width.saturating_sub(line.chars().count() + 1);
        out += &format!("\n{}\n", paint("2", &format!("{line} {}", "─".repeat(rest))));
        let text = clean(&page.text[byte..next.map_or(page.text.len(), |n| n.0)]);
        out += &paint(if i % 2 == 0 { "36" } else { "33" }, text.trim_end_matches('\n'));
        out.push('\n');
    }
    out
}

/// Control characters made visible: a document must not steer the terminal.
fn clean(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' | '\t' => c,
        '\u{7f}' => '\u{2421}',
        c if c.is_ascii_control() => char::from_u32(0x2400 + c as u32).unwrap_or(' '),
        c if c.is_control() => '\u{fffd}',
        c => c,
    };
    text.chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{PageEdges, Program};
    use super::*;

    #[test]
    fn a_document_on_a_terminal() {
        let edges = PageEdges {
            token: vec![10, 30],
            at: vec![6, 12],
            kind: vec!["sentence", "fallback"],
            score: vec![Some(-0.5), None],
            utility: vec![Some(1.0), None],
            damage: vec![Some(3.25), None],
            ..PageEdges::default()
        };
        let page = Page {
            id: "d\x1b[1m".into(),
            text: "One.\n\n\x1b[31m. Three".into(),
            tokens: 40,
            edges,
            cuts: vec![0, 1],
            gold: Some(vec![10]),
            ..Page::default()
        };
        let report = Report { program: Some(Program { damage: true, penalty: 22.0, ..Program::default() }), ..Report::default() };
        let text = terminal(&report, &page, 40, false);
        assert!(text.starts_with("d␛[1m: 40 tokens, 3 chunks, penalty 22 nats\n"), "{text}");
        assert!(text.contains("          █"), "the utility at a quarter of the width\n{text}");
        assert!(text.contains("── 1, tokens 10 to 30 (20), cut damage 3.2 nats, score -0.500, utility 1.000"), "{text}");
        assert!(
            text.contains("── 2, tokens 30 to 40 (10), a fallback edge") && text.contains("\nOne.\n") && text.contains("␛[31m."),
            "{text}"
        );
        assert!(!text.contains('\x1b') && terminal(&report, &page, 40, true).contains("\x1b[36mOne."));
    }
}
