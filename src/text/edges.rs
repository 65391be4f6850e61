//! Legal, candidate and fallback edges of a tokenized document (design section 2).

use serde::{Deserialize, Serialize};

use super::boundaries::{grapheme_starts, is_closing, sentence_ends, unspaced_word_starts};
use super::tokenizer::Tokens;
use crate::index::{ByteIdx, TokenIdx};

/// Why an edge is on the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EdgeKind {
    /// The word boundary nearest to a multiple of the grid.
    Word,
    /// The first word boundary after the end of a sentence.
    Sentence,
    /// Not a candidate: a place to cut where candidates are far apart. Never scored.
    Fallback,
}

impl EdgeKind {
    /// The name used in files.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Word => "word",
            Self::Sentence => "sentence",
            Self::Fallback => "fallback",
        }
    }
}

/// A place where a document may be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edge {
    /// Tokens on its left.
    pub token: TokenIdx,
    /// Bytes on its left.
    pub byte: ByteIdx,
    /// Why it is on the list.
    pub kind: EdgeKind,
}

impl Edge {
    /// Whether the edge is scored.
    #[must_use]
    pub fn is_candidate(&self) -> bool {
        self.kind != EdgeKind::Fallback
    }
}

/// The edges of one document and its length.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Edges {
    /// Tokens of the document.
    pub tokens: u32,
    /// Edges in text order.
    pub edges: Vec<Edge>,
}

/// Which edges are candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EdgePolicy {
    /// One candidate per this many tokens; at least 1.
    pub grid: u32,
    /// Whether every sentence end is a candidate too.
    pub sentence_ends: bool,
}

impl Default for EdgePolicy {
    fn default() -> Self {
        Self { grid: 8, sentence_ends: true }
    }
}

/// A legal edge: token, byte, and whether a word starts there.
#[derive(Debug, Clone, Copy)]
struct Legal {
    token: u32,
    byte: usize,
    word: bool,
}

/// Finds the candidate and fallback edges of `text`, whose tokens are `tokens`.
///
/// Works in time and memory linear in the text. Never fails: a span that points outside the text or into a character makes the edge
/// before that token illegal.
#[must_use]
pub fn find_edges(text: &str, tokens: &Tokens, policy: EdgePolicy) -> Edges {
    let n = u32::try_from(tokens.ids.len()).unwrap_or(u32::MAX);
    let legal = legal_edges(text, tokens);
    let words: Vec<Legal> = legal.iter().copied().filter(|e| e.word).collect();

    let mut kinds: Vec<(u32, usize, EdgeKind)> = Vec::new();
    for edge in nearest(&words, grid_points(0, n, policy.grid)) {
        kinds.push((edge.token, edge.byte, EdgeKind::Word));
    }
    if policy.sentence_ends && !words.is_empty() {
        let mut next = 0;
        for end in sentence_ends(text) {
            while next < words.len() && words[next].byte < end {
                next += 1;
            }
            if let Some(edge) = words.get(next) {
                kinds.push((edge.token, edge.byte, EdgeKind::Sentence));
            }
        }
    }
    // A sentence end that is on the grid too counts as a sentence end.
    kinds.sort_unstable_by_key(|&(token, _, kind)| (token, kind == EdgeKind::Word));
    kinds.dedup_by_key(|k| k.0);

    let mut edges = Vec::with_capacity(kinds.len());
    let mut previous = 0;
    let mut from = 0;
    let ends = kinds.iter().map(|&(token, byte, kind)| (token, Some((byte, kind)))).chain([(n, None)]);
    for (token, candidate) in ends {
        if token - previous > 2 * policy.grid {
            while from < legal.len() && legal[from].token <= previous {
                from += 1;
            }
            let gap = legal[from..].iter().take_while(|e| e.token < token).count();
            for edge in nearest(&legal[from..from + gap], grid_points(previous, token, policy.grid)) {
                edges.push(Edge { token: TokenIdx(edge.token), byte: ByteIdx(edge.byte as u64), kind: EdgeKind::Fallback });
            }
            from += gap;
        }
        if let Some((byte, kind)) = candidate {
            edges.push(Edge { token: TokenIdx(token), byte: ByteIdx(byte as u64), kind });
        }
        previous = token;
    }
    Edges { tokens: n, edges }
}

/// Multiples of `grid` strictly between `low` and `high`.
fn grid_points(low: u32, high: u32, grid: u32) -> impl Iterator<Item = u32> {
    (low / grid + 1..).map(move |i| i.saturating_mul(grid)).take_while(move |&g| g < high)
}

/// For each of the ascending `points` the nearest edge (the earlier on a tie), without repetitions, ascending.
fn nearest(edges: &[Legal], points: impl Iterator<Item = u32>) -> Vec<Legal> {
    let mut out: Vec<Legal> = Vec::new();
    if edges.is_empty() {
        return out;
    }
    let mut i = 0;
    for point in points {
        while i + 1 < edges.len() && edges[i + 1].token.abs_diff(point) < edges[i].token.abs_diff(point) {
            i += 1;
        }
        if out.last().is_none_or(|last| last.token != edges[i].token) {
            out.push(edges[i]);
        }
    }
    out
}

/// All legal edges, in text order.
fn legal_edges(text: &str, tokens: &Tokens) -> Vec<Legal> {
    let graphemes = grapheme_starts(text);
    let unspaced = unspaced_word_starts(text);
    let mut out = Vec::new();
    // Bytes that earlier tokens reach, and the position of the last legal edge (none may lie at 0).
    let mut reached = 0;
    let mut last = 0;
    for (b, &(start, end)) in tokens.spans.iter().enumerate() {
        let covered = reached;
        reached = reached.max(end);
        if b == 0 {
            continue;
        }
        let Some(byte) = first_visible(text, start, end) else {
            continue;
        };
        // A token before that reaches past `byte` holds part of the character there.
        if byte <= last || covered > byte || graphemes.as_ref().is_some_and(|g| !g.contains(byte)) {
            continue;
        }
        last = byte;
        let Ok(token) = u32::try_from(b) else { break };
        out.push(Legal { token, byte, word: starts_word(text, byte, unspaced.as_ref()) });
    }
    out
}

/// Position of the first character that is not white space in `text[start..end]`, if that range is one of the text.
fn first_visible(text: &str, start: usize, end: usize) -> Option<usize> {
    let (offset, _) = text.get(start..end)?.char_indices().find(|(_, c)| !c.is_whitespace())?;
    Some(start + offset)
}

/// Whether a word starts at `byte`, a character boundary inside the text.
fn starts_word(text: &str, byte: usize, unspaced: Option<&super::boundaries::ByteSet>) -> bool {
    let Some(next) = text[byte..].chars().next() else {
        return false;
    };
    if is_closing(next) {
        return false;
    }
    text[..byte].chars().next_back().is_some_and(char::is_whitespace) || unspaced.is_some_and(|set| set.contains(byte))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Tokens at the given cut positions, spans tiling the text.
    fn tiled(text: &str, cuts: &[usize]) -> Tokens {
        let mut spans = Vec::new();
        let mut start = 0;
        for &end in cuts.iter().chain([&text.len()]) {
            if end > start {
                spans.push((start, end));
                start = end;
            }
        }
        Tokens { ids: vec![0; spans.len()], spans }
    }

    fn by_char(text: &str) -> Tokens {
        tiled(text, &text.char_indices().map(|(i, _)| i).collect::<Vec<_>>())
    }

    fn all(text: &str, grid: u32) -> Vec<(u32, u64, &'static str)> {
        let edges = find_edges(text, &by_char(text), EdgePolicy { grid, sentence_ends: true });
        edges.edges.iter().map(|e| (e.token.0, e.byte.0, e.kind.as_str())).collect()
    }

    #[test]
    fn grid_takes_the_nearest_word_and_the_earlier_on_a_tie() {
        // Words start at 3, 6, 9, 12: the grid points 4, 8, 12 take 3, 9, 12.
        assert_eq!(all("ab cd ef gh ij", 4), [(3, 3, "word"), (9, 9, "word"), (12, 12, "word")]);
        // Grid point 4 lies as far from 3 as from 5.
        assert_eq!(all("ab c defgh", 4)[0], (3, 3, "word"));
    }

    #[test]
    fn sentence_ends_are_candidates_after_white_space() {
        assert_eq!(all("Go on. Stop it now please", 8).first(), Some(&(7, 7, "sentence")));
        assert!(all("He left ! Then he came", 8).iter().all(|e| e.0 != 8), "never before closing punctuation");
    }

    #[test]
    fn text_without_words_gets_fallback_edges() {
        let edges = all(&"x".repeat(40), 8);
        assert_eq!(edges, [8, 16, 24, 32].map(|b| (b, u64::from(b), "fallback")));
    }

    #[test]
    fn no_edge_inside_characters_clusters_or_at_repeated_offsets() {
        let family = "👩‍👩‍👧";
        let text = format!("a {family} b");
        let edges = legal_edges(&text, &by_char(&text));
        assert_eq!(edges.iter().map(|e| e.byte).collect::<Vec<_>>(), [2, text.len() - 1]);
        // One character in three tokens, spans repeated, as byte-level tokenizers give them.
        let split = Tokens { ids: vec![0; 4], spans: vec![(0, 4), (0, 4), (0, 4), (4, 6)] };
        assert_eq!(legal_edges("🎉 x", &split).iter().map(|e| e.token).collect::<Vec<_>>(), [3]);
        // A token that holds the space and the first byte of the character.
        let shared = Tokens { ids: vec![0; 3], spans: vec![(0, 1), (1, 4), (2, 4)] };
        assert_eq!(legal_edges("a é", &shared).iter().map(|e| e.token).collect::<Vec<_>>(), [1]);
        let lone = Tokens { ids: vec![0; 2], spans: vec![(0, 3), (1, 3)] };
        assert!(legal_edges(" é", &lone).is_empty());
    }

    proptest! {
        #[test]
        fn edges_ascend_and_lie_on_characters(text in "\\PC{0,80}", spans in proptest::collection::vec((0usize..90, 0usize..90), 0..60)) {
            let tokens = Tokens { ids: vec![0; spans.len()], spans };
            let edges = find_edges(&text, &tokens, EdgePolicy { grid: 4, sentence_ends: true }).edges;
            for pair in edges.windows(2) {
                prop_assert!(pair[0].token < pair[1].token && pair[0].byte < pair[1].byte);
            }
            for edge in &edges {
                prop_assert!(edge.byte.get() > 0 && text.is_char_boundary(edge.byte.get()));
            }
        }

        #[test]
        fn tiled_tokens_give_grid_candidates_everywhere_there_are_words(text in "[a-z]{1,6}( [a-z]{1,6}){20,60}") {
            let edges = find_edges(&text, &by_char(&text), EdgePolicy { grid: 8, sentence_ends: false });
            let mut last = 0;
            for edge in &edges.edges {
                prop_assert!(edge.token.0 - last <= 16);
                last = edge.token.0;
            }
            prop_assert!(edges.tokens - last <= 16);
        }
    }
}
