//! The prompted segmenter (paper, sections 4 and A.2): an instruction model is shown twelve tagged candidates at a time and asked how probable it is that a new
//! document begins at each.

use std::ops::Range;

use super::ScoreError;
use crate::model::Chat;
use crate::text::{Edge, Tokens};

/// Candidates of one question.
const EDGES: usize = 12;

/// Tokens of text on each side of them.
const CONTEXT: usize = 96;

/// Tokens that an answer may take, for each candidate: a tag, a probability and the end of the line, with some to spare.
const ANSWER: usize = 14;

/// The score of a candidate that the answer leaves out.
pub const OMITTED: f32 = 0.0;

/// Revision of the question and of how answers are read: raised when a change of code changes scores.
pub const PROMPT_REVISION: u32 = 1;

/// Asks an instruction model about the candidates of a document: for each the probability of a cut, 0 to 1, or none where the answer has none; and the
/// tokens that went through the model.
///
/// # Errors
/// [`ScoreError`] of the model.
pub fn prompted(chat: &Chat, text: &str, tokens: &Tokens, candidates: &[&Edge]) -> Result<(Vec<Option<f32>>, u64), ScoreError> {
    let (mut told, mut forward_tokens) = (Vec::with_capacity(candidates.len()), 0);
    for edges in candidates.chunks(EDGES) {
        let (answer, count) = chat.answer(&question(edges.len(), &passage(text, tokens, edges)), ANSWER * edges.len() + ANSWER)?;
        told.extend(probabilities(&answer, edges.len()));
        forward_tokens += count as u64;
    }
    Ok((told, forward_tokens))
}

fn question(edges: usize, passage: &str) -> String {
    format!(
        "The text below is made of several documents that were joined without a separator. Tags [1] to [{edges}] mark places in it. For each tag, give the \
         probability between 0.00 and 1.00 that a new document begins right after it. Answer with {edges} lines, each a tag and its probability, like this:\n\
         [1] 0.05\n\nText:\n{passage}\n\nProbabilities of tags [1] to [{edges}]:"
    )
}

/// The text around candidates with a tag at each; what lies further from all of them is left out.
fn passage(text: &str, tokens: &Tokens, edges: &[&Edge]) -> String {
    let byte = |token: usize| tokens.spans.get(token).map_or(text.len(), |span| text.floor_char_boundary(span.0));
    let mut shown: Vec<Range<usize>> = Vec::new();
    for edge in edges {
        let token = edge.token.0 as usize;
        let around = byte(token.saturating_sub(CONTEXT))..byte(token + CONTEXT);
        match shown.last_mut() {
            Some(last) if around.start <= last.end => last.end = around.end,
            _ => shown.push(around),
        }
    }
    let (mut out, mut edges) = (String::new(), (1..).zip(edges).peekable());
    for range in shown {
        if !out.is_empty() {
            out += "\n...\n";
        }
        let mut at = range.start;
        while let Some((number, edge)) = edges.next_if(|(_, edge)| (edge.byte.0 as usize) < range.end) {
            let (before, after) = (&text[at..edge.byte.0 as usize], &text[edge.byte.0 as usize..]);
            let space = |missing: bool| if missing { " " } else { "" };
            out += &format!(
                "{before}{}[{number}]{}",
                space(!before.ends_with(char::is_whitespace)),
                space(!after.starts_with(char::is_whitespace))
            );
            at = edge.byte.0 as usize;
        }
        out += &text[at..range.end];
    }
    out
}

/// Reads an answer: on each line, or between commas, the first number is a tag and the last a probability, or a percentage. The first word on a tag counts.
fn probabilities(answer: &str, edges: usize) -> Vec<Option<f32>> {
    let mut found = vec![None; edges];
    for line in answer.split(['\n', ',', ';', '{', '}']) {
        let numbers = numbers(line);
        let (Some((tag, false)), [_, .., (value, percent)]) = (numbers.first().copied(), &numbers[..]) else { continue };
        let (place, value) = (tag as usize, if *percent { value / 100.0 } else { *value });
        if tag.fract() == 0.0 && (1..=edges).contains(&place) && (0.0..=1.0).contains(&value) && found[place - 1].is_none() {
            found[place - 1] = Some(value);
        }
    }
    found
}

/// The numbers of a line, and whether a per cent sign follows.
fn numbers(line: &str) -> Vec<(f32, bool)> {
    let mut found = Vec::new();
    let mut rest = line;
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        let number = &rest[start..];
        let end = number.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(number.len());
        rest = &number[end..];
        if let Ok(value) = number[..end].trim_end_matches('.').parse() {
            found.push((value, rest.starts_with('%')));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{ByteIdx, TokenIdx};
    use crate::text::EdgeKind;

    #[test]
    fn answers_are_read_in_the_ways_models_write_them() {
        let read = |answer: &str| probabilities(answer, 3);
        let all = vec![Some(0.05), Some(0.5), Some(1.0)];
        for answer in [
            "[1] 0.05\n[2] 0.5\n[3] 1",
            "1: 0.05, 2: .5 (0.50), 3: 1.00.",
            "{\"1\": 0.05, \"2\": 0.50,\n\"3\": 1.0}",
            "1. [1] 5%\n2. [2] 50 % or 0.5\n3. [3] 100%",
            "Tag [1]: 0.05\nTag [2]: 0.5\nTag [3]: 1.0\n[3] 0.2\n[4] 0.1",
        ] {
            assert_eq!(read(answer), all, "{answer:?}");
        }
        for answer in ["", "The probability is 0.05", "Probability of [1]\n[2] 1.5\n[3] seven", "0 0.4\n-", "1.2 0.3"] {
            assert_eq!(read(answer), [None; 3], "{answer:?}");
        }
        assert_eq!(read("[2] 0.25"), [None, Some(0.25), None]);
    }

    #[test]
    fn passages_show_what_is_near_and_tag_the_places() {
        // Tokens of five bytes: "aaaa ".
        let text = "aaaa ".repeat(600);
        let tokens = Tokens { ids: vec![0; 600], spans: (0..600).map(|t| (5 * t, 5 * t + 5)).collect() };
        let edge = |token: u32, byte: u64| Edge { token: TokenIdx(token), byte: ByteIdx(byte), kind: EdgeKind::Word };
        let edges = [edge(100, 500), edge(110, 549), edge(500, 2500)];
        let shown = passage(&text, &tokens, &edges.iter().collect::<Vec<_>>());
        let a = |n: usize| "aaaa ".repeat(n);
        assert_eq!(shown, format!("{}[1] {}aaaa [2]{}\n...\n{}[3] {}", a(96), a(9), &a(97)[4..], a(96), a(96)));
        assert_eq!(passage("é b", &Tokens { ids: vec![0; 2], spans: vec![(0, 2), (2, 4)] }, &[&edge(1, 2)]), "é [1] b");
    }
}
